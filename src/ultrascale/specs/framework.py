"""Framework: what the engine that runs a layout does with it. Fusions, kernels, overlap, formats of states.

The same layout takes other time and memory in Megatron-Core, in FSDP without compile, or in a paper of 2020. Each field is a
thing one can look up in the engine's code; `ultrascale` is ours. Without settings a Framework is the idealised engine of the
playbook.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.files import package_data
from ultrascale.specs.validate import build


class Framework(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "playbook"
    engine: Literal["", "ultrascale", "torchtitan", "megatron", "nanotron", "deepspeed", "accelerate"] = Field(
        "", description="whose limits a layout keeps (presets/engines.yaml); without one, every legal layout runs"
    )
    elementwise: float = Field(
        1.0, gt=0, le=20, description="bytes that memory-bound operators move, relative to a compiled block"
    )
    launch: float = Field(1.0, gt=0, le=200, description="host time to launch a layer's kernels, relative to 12 bare launches")
    launch_sharded: float = Field(
        0.0, ge=0, le=200, description="what ZeRO-3 adds to `launch`: hooks that gather a layer's weights and free them"
    )
    launch_tensor: float = Field(
        0.0, ge=0, le=200, description="what tensor parallelism adds to `launch`: collectives, and DTensors in Python"
    )
    attention: Literal["flash", "flash-1", "flash-2", "plain", "plain-fused"] = Field(
        "flash",
        description="the kernel; plain writes scores out, plain-fused scales, masks and softmaxes in one pass",
    )
    selective: Literal["cheap", "half", "alternate", "alternate-unjoined", "modules", "attention"] = Field(
        "cheap",
        description="what selective recomputation repeats: cheap operators; half the GEMMs too; of a dense layer's GEMMs every "
        "second in the order of calls, attention's output and up (torchtitan from 0.3 on), and where q, k and v are GEMMs of "
        "their own k too (alternate-unjoined, torchtitan until 0.2); Megatron's modules "
        "(mla_up_proj of latent attention, layernorm and moe_act of other models with experts, core_attn of dense ones); or "
        "attention alone (core_attn of every model)",
    )
    loss: Literal[
        "at-once",
        "overwritten",
        "fused",
        "in-place",
        "cast",
        "fp32",
        "fp32-softmax",
        "log-softmax",
        "dtensor",
        "compiled",
        "chunked",
        "chunked-gradients",
        "chunked-gradients-fp32",
    ] = Field(
        "fused",
        description="fused: no fp32 logits; overwritten: and their gradient takes their place; in-place: fp32 logits become "
        "softmax, then gradient (Megatron's unfused); cast: the same, copied, beside logits in the compute format (Megatron's "
        "fusion without Transformer Engine, compiled); fp32: each is written out and kept; "
        "fp32-softmax: the same three at once, of which the softmax is kept and becomes the gradient (nanotron); "
        "log-softmax: each is written out, but only the fp32 log-softmax is kept; "
        "dtensor: the same, but over a cut vocabulary four fp32 copies in backward (torchtitan until 0.2, not compiled); "
        "compiled: fused, but over a cut vocabulary logits, their fp32 copy and its softmax (the same, compiled); "
        "chunked: an eighth of the logits at a time; chunked-gradients: the same with gradients of hidden states and head, "
        "summed in fp32 (torchtitan from 0.3 on); chunked-gradients-fp32: and their logits are written out in fp32; "
        "at-once: 4096 tokens at a time (times tp), gradients of hidden states and head made with the loss and kept instead",
    )
    loss_parallel: bool = Field(
        True, description="logits stay cut over tp; else every rank gathers them (counted in memory alone)"
    )
    states: Literal["master", "fp32", "pure"] = Field(
        "master", description="master: bf16 copy + fp32 master; fp32: FSDP's fp32 shards, cast when gathered; pure: bf16 all"
    )
    accumulation: Literal[
        "separate", "fused", "after-backward", "unsharded", "unsharded-in-pipelines", "bf16-and-fp32", "stepped"
    ] = Field(
        "separate",
        description="separate: each weight gradient is added as it is made; fused: the weight-gradient GEMM adds into the "
        "fp32 gradient itself; after-backward: a micro-batch's gradients wait in bf16 for the end of its backward, and "
        "ZeRO-1 all-reduces whole gradients (nanotron); unsharded: ZeRO adds whole gradients of several micro-batches and "
        "reduce-scatters after the last (Accelerate); unsharded-in-pipelines: the same in pipelines alone (torch's); "
        "bf16-and-fp32: ZeRO-1 holds whole gradients in bf16 too, and ZeRO-1 and 2 all-reduce these (DeepSpeed); stepped: a "
        "weight is stepped as soon as it has its gradient, which is freed (optimizer in backward, one micro-batch a step)",
    )
    stage_split: Literal["balanced", "layers", "layers-and-head", "layers-and-ends", "torchtitan", "nanotron"] = Field(
        "balanced",
        description="pipeline stages share layers and the head's FLOPs; layers alone; layers with the head as one of them "
        "(Megatron's account-for-loss), or the head and the embedding as one each (layers-and-ends, Megatron's both flags: the "
        "first and the last stage may have no layer; torchtitan); or take blocks until their share of the cost is reached "
        "(nanotron)",
    )
    foreach_optimizer: bool = Field(
        False,
        description="AdamW writes the square roots of all second moments before it steps: torch's for several tensors at "
        "a time, neither fused nor Transformer Engine's",
    )
    optimizer_passes: float = Field(1.0, gt=0, le=20, description="bytes the optimizer moves, relative to a fused one")
    overlap: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share that may hide of ZeRO's gathers, gradient reductions and, with tp_comm_overlap, a dense layer's "
        "tensor-parallel communication",
    )
    expert_overlap: Literal["none", "weight-gradients", "microbatches"] = Field(
        "weight-gradients",
        description="what hides expert all-to-alls: weight gradients of the experts, and where that is faster rows whose "
        "experts are on their own rank; or another micro-batch (Megatron's 1F1B overlap, DualPipe)",
    )
    shared_expert_overlap: bool = Field(
        True, description="shared experts are computed while tokens travel; Megatron-Core does so with its all-to-all alone"
    )
    routing: Literal["grouped", "dropless", "graphed", "capacity"] = Field(
        "grouped",
        description="host work of a MoE layer: none beyond grouped kernels; counts read back and kernels per expert; the same "
        "in CUDA graphs; or grouped kernels of one size, as tokens are dropped (cost/surfaces/host.yaml)",
    )
    rails: bool = Field(True, description="collectives across nodes use every NIC of a node, not one per ring")
    fp8_gather: bool = Field(True, description="ZeRO-3 gathers the weights of fp8 GEMMs in fp8, not in bf16")
    eager_activation: bool = Field(False, description="autograd keeps the gate's activation beside its input and their product")
    fp8_gates: bool = Field(False, description="with fp8 GEMMs the inputs of gates are saved in fp8 (DeepSeek-V3)")
    transformer_engine: bool = Field(
        False,
        description="Megatron-Core's layers: fp8 GEMMs keep their inputs in fp8, queries and keys are kept before their norm; "
        "scores and routing maps take 17 bytes a token and expert, "
        "routing weighs activations instead of experts' outputs, and experts' biases are added in fp32 after the GEMMs",
    )
    sliced_routing: Literal["never", "with-ep", "always"] = Field(
        "never",
        description="each tp rank routes its slice of the sequence, and experts that tp cuts gather the rows that arrived at "
        "its ranks (always: Megatron-Core; with-ep: torchtitan from 0.3 on, if experts are on several ranks, and else in the "
        "router's backward alone); else each has all tokens and sends them to its part of the experts",
    )
    expert_padding: int = Field(
        0, ge=0, le=1024, description="rows for each expert beside those that were sent to it (torchtitan until 0.2)"
    )
    routing_format: Literal["compute", "fp32-gemm", "fp32"] = Field(
        "compute",
        description="in what experts' outputs are weighed and summed: the compute format; fp32, by a GEMM, which keeps them so "
        "(torchtitan until 0.2); or fp32, of which only layers that are not compiled keep them, and the router its input "
        "(torchtitan from 0.3 on)",
    )
    tp_comm_overlap: bool = Field(
        True, description="with transformer_engine: a dense layer's tensor-parallel communication overlaps its matmuls"
    )
    exact_memory_trace: bool = Field(
        False,
        description="the engine was traced operator by operator: short-lived tensors are counted while they live, else all "
        "at once; full recomputation ends at the last tensor that backward needs (torch.utils.checkpoint)",
    )
    buffers: Literal["concurrent", "rehearsed"] = Field(
        "concurrent",
        description="communication buffers and fresh gradients without exact_memory_trace: all live at the same time, as a "
        "planner must assume; or when the engine's rehearsals show them (cost/memory/rehearsed_engines.py)",
    )
    norm: Literal["fused", "fp32"] = Field(
        "fused", description="a norm keeps its input; or that in fp32, and the result before its weight (transformers)"
    )
    gathered_inputs: bool = Field(
        False, description="with sequence parallelism GEMMs keep their gathered inputs, which backward does not gather again"
    )
    sums_in_backward: bool = Field(
        False,
        description="gradients of weights that several tp ranks hold, such as norms', are summed over these in every backward, "
        "before ZeRO reduces them (DTensor's); else once a step",
    )
    context: Literal["layout", "ring", "ring-compiled", "flex"] = Field(
        "layout",
        description="how keys and values travel under context parallelism: as the layout says; ring, torch's: gathered for "
        "forward and for backward (compiled: once, and kept), which passes their gradients on in fp32, as many times as there "
        "are ranks; flex, torch's for FlexAttention: gathered for forward, which every recomputation repeats, and kept, their "
        "gradients reduce-scattered",
    )
    autocast: bool = Field(
        False,
        description="without ZeRO: torch.autocast, so that the residual stream is fp32 and weights are cast when they are used",
    )
    fragmentation: float = Field(
        0,
        ge=0,
        le=4,
        description="of activations, and of inputs gathered and freed: what the allocator's cache loses to holes",
    )
    unrotated_heads: bool = Field(False, description="the output of the q, k, v GEMM is kept beside rotated q and k")
    keeps_gradients: Literal["always", "captured", "never"] = Field(
        "always",
        description="gradients stay allocated between steps, and are set to zero; captured: of steps that are CUDA graphs, "
        "without pipelines and expert parallelism (torchtitan from 0.3 on)",
    )
    early_stop: bool = Field(
        False,
        description="full recomputation stops at the last tensor that backward needs; with exact_memory_trace it does. With "
        "live_parameters ZeRO-3 does not save it before the layer's last GEMM",
    )
    head_gathers: Literal[0, 1, 3] = Field(
        0,
        description="how often FSDP's ZeRO-3 gathers head and final norm for a micro-batch, beside two gathers of embedding "
        "and layers; 0: its root has embedding and head, and gathers them once",
    )
    ddp_buckets: bool = Field(False, description="without ZeRO, DDP's buckets hold all gradients once more")
    reduce_bucket: float = Field(
        0, ge=0, le=1e11, description="elements of the bucket in which ZeRO reduces gradients; ZeRO-2 has two (DeepSpeed)"
    )
    live_parameters: float = Field(
        0, ge=0, le=1e12, description="elements that ZeRO-3 keeps gathered before it frees any (DeepSpeed); 0: two layers"
    )
    fused_blocks: bool = Field(
        False,
        description="our engine on a GPU: Llama-like layers keep neither norm nor gate outputs, without ZeRO AdamW's masters "
        "share their upper half with the bf16 copy, gradients of a single micro-batch are not accumulated, and launches were "
        "counted",
    )
    cuda_graphs: bool = Field(False, description="steps of one stage replay a CUDA graph where the host would be slower")
    source: str = ""
    seen: str = Field("", description="versions whose rehearsals the fields of memory and traffic come from, and when")

    @property
    def tensor_overlap(self) -> float:
        return self.overlap if self.transformer_engine and self.tp_comm_overlap else 0.0

    @property
    def compiles(self) -> bool:
        """Layers, so that selective recomputation does not repeat what leads to kept tensors alone."""
        return not self.eager_activation

    @property
    def stops_early(self) -> bool:
        return self.early_stop or self.exact_memory_trace

    @property
    def keeps_heads_before_norm(self) -> bool:
        """Queries and keys that are normed are kept before their norm too."""
        return self.transformer_engine or self.exact_memory_trace or self.buffers == "rehearsed"

    @property
    def router_bytes(self) -> int:
        """Bytes kept per token and expert. Transformer Engine: scores and the auxiliary loss's in fp32, the map of choices,
        and two int32 of the permutation's row map.
        """
        return 17 if self.transformer_engine else 4

    @classmethod
    def load(cls, name: str) -> Framework:
        found = cls.presets().get(name.strip().lower())
        if found is None:
            raise SpecError(f"framework '{name}' is not known: {nearest(name, cls.presets())}")
        return found

    @classmethod
    def own(cls, gpu: str) -> Framework:
        """Our engine on such a GPU; on a CPU nothing is compiled."""
        return cls.load("ultrascale-eager" if gpu == "cpu" else "ultrascale")

    @classmethod
    def presets(cls) -> dict[str, Framework]:
        return dict(_presets())


@cache
def _presets() -> dict[str, Framework]:
    data = package_data("ultrascale.specs", "presets/frameworks.yaml")
    return {name: build(Framework, {"name": name, **(fields or {})}, f"framework {name}") for name, fields in data.items()}
