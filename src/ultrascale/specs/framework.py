"""Framework: what the engine that runs a layout does with it. Fusions, kernels, overlap, formats of states.

The same layout takes other time and memory in Megatron-Core, in FSDP without compile, or in a paper of 2020. Each field is a
thing one can look up in the engine's code; `ultrascale` is ours.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.validate import build


class Framework(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "ultrascale"
    elementwise: float = Field(
        1.0, gt=0, le=20, description="bytes that memory-bound operators move, relative to a compiled block"
    )
    kernels: float = Field(1.0, gt=0, le=50, description="kernels launched per layer, relative to a compiled block")
    counted: bool = Field(
        False, description="launches of its layers were counted, and nothing waits for the GPU until a step's end: one queue"
    )
    launch: float = Field(1.0, gt=0, le=50, description="host time per kernel, relative to the cluster's kernel_launch_s")
    attention: Literal["flash", "flash-1", "flash-2", "plain", "plain-fused"] = Field(
        "flash",
        description="the kernel; plain writes scores out, plain-fused scales, masks and softmaxes in one pass",
    )
    selective: Literal["cheap", "half", "latents"] = Field(
        "cheap",
        description="what selective recomputation repeats: cheap operators, half the products too, or of latent attention the "
        "up-projections alone (Megatron's mla_up_proj)",
    )
    early_stop: bool = Field(
        False,
        description="full recomputation ends at the last tensor that backward needs: a layer's last product is not repeated",
    )
    balanced: bool = Field(True, description="pipeline stages are cut with the head counted; else layers alone are")
    head_as_layer: bool = Field(
        False, description="where layers alone are counted, the head counts as one of them (Megatron's account-for-loss)"
    )
    filled: bool = Field(
        False,
        description="stages take blocks until their share of the cost is reached, that block included (nanotron)",
    )
    rails: bool = Field(True, description="collectives across nodes use every NIC of a node, not one per ring")
    loss: Literal["at-once", "overwritten", "fused", "in-place", "fp32", "log-softmax", "chunked"] = Field(
        "fused",
        description="fused: no fp32 logits; overwritten: and their gradient takes their place; in-place: fp32 logits become "
        "softmax, then gradient (Megatron's unfused); fp32: each is written out and kept; "
        "log-softmax: each is written out, but only the fp32 log-softmax is kept; "
        "chunked: an eighth of the logits at a time; "
        "at-once: 4096 tokens at a time, gradients of hidden states and head made with the loss and kept instead",
    )
    eager_activation: bool = Field(False, description="autograd keeps the gate's activation beside its input and the product")
    followed: bool = Field(
        False,
        description="the engine was followed operator by operator: what exists for a moment is counted at that moment; "
        "else all of it at once",
    )
    fp8_inputs: bool = Field(
        False, description="products in fp8 keep their inputs for backward in fp8 (Transformer Engine), not in bf16"
    )
    fp8_gather: bool = Field(True, description="ZeRO-3 gathers the weights of fp8 products in fp8, not in bf16")
    expert_outputs: bool = Field(
        True, description="experts' outputs are kept, to weigh them; else routing weighs the activations, which are kept anyway"
    )
    router_bytes: float = Field(
        4.0, ge=0, le=64, description="bytes kept per token and expert of a layer: scores, and maps of who goes where"
    )
    expert_biases_apart: bool = Field(
        False,
        description="biases of experts' outputs are weighed and added in fp32 after the products, expert by expert",
    )
    heads_before_norm: bool = Field(
        False, description="queries and keys that are normed are kept before their norm too (Transformer Engine's norms)"
    )
    states: Literal["master", "fp32", "pure"] = Field(
        "master", description="master: bf16 copy + fp32 master; fp32: FSDP's fp32 shards, cast when gathered; pure: bf16 all"
    )
    halves: bool = Field(
        False,
        description="without ZeRO, AdamW's fp32 masters share their upper 16 bits with the bf16 copy: 4 bytes a weight, not 6",
    )
    lean: bool = Field(
        False,
        description="whole Llama-like layers keep neither norms' nor gates' outputs: backward's kernels write them once more",
    )
    tensor_overlap: float = Field(0.0, ge=0, le=1, description="share of a dense layer's tp exchange that may hide")
    expert_overlap: float = Field(0.0, ge=0, le=1, description="share of the expert exchange that hides")
    experts_behind: bool = Field(
        True,
        description="gradients of experts' matrices are made while those of rows travel home; and where that is faster, rows "
        "whose experts are on their own rank are multiplied while others travel",
    )
    gather_overlap: float = Field(1.0, ge=0, le=1, description="share of ZeRO's gathers that may hide")
    reduce_overlap: float = Field(1.0, ge=0, le=1, description="share of gradient reductions that may hide")
    late_gradients: bool = Field(
        False, description="a micro-batch's gradients are added to the fp32 ones after its backward: all of them wait in bf16"
    )
    gradients_as_made: bool = Field(
        False, description="one micro-batch on one GPU: gradients stay in the format that computes and come as activations go"
    )
    recorded: bool = Field(
        False, description="one GPU's steps are recorded and launched as one where the host would set their pace"
    )
    zero1_all_reduce: bool = Field(
        False, description="ZeRO-1 all-reduces whole gradients after the last backward, which hides nothing"
    )
    routing_s: float = Field(
        0.0, ge=0, le=1, description="host time of one MoE layer's routing in forward: counts read back, permutations, loops"
    )
    grouped: bool = Field(True, description="all experts of a rank in one kernel; else products and casts per expert")
    sliced_routing: bool = Field(
        False,
        description="where tp cuts experts, each tp rank routes its slice of the sequence; else every one routes all tokens",
    )
    dispatch: Literal["all-to-all", "node-wise"] = Field(
        "all-to-all", description="node-wise: a token crosses to a node once, however many of its experts live there"
    )
    fused_accumulation: bool = Field(False, description="the weight-gradient product adds into the fp32 gradient itself")
    optimizer_passes: float = Field(1.0, gt=0, le=20, description="bytes the optimizer moves, relative to a fused one")
    source: str = ""

    @classmethod
    def load(cls, name: str) -> Framework:
        found = cls.presets().get(name.strip().lower())
        if found is None:
            raise SpecError(f"framework '{name}' is not known: {nearest(name, cls.presets())}")
        return found

    @classmethod
    def presets(cls) -> dict[str, Framework]:
        return dict(_presets())


@cache
def _presets() -> dict[str, Framework]:
    text = resources.files("ultrascale.specs").joinpath("presets/frameworks.yaml").read_text(encoding="utf-8")
    data: dict[str, Any] = yaml.safe_load(text)
    return {name: build(Framework, {"name": name, **(fields or {})}, f"framework {name}") for name, fields in data.items()}
