"""Job: what the user wants trained, on what, with which batch and numbers. How it is cut is the Layout's business."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

from pydantic import Field, model_validator

from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError
from ultrascale.specs.framework import Framework
from ultrascale.specs.model import Model
from ultrascale.specs.validate import FrozenSpec, build

Precision = Literal["fp32", "fp16", "bf16", "fp8"]
AdapterTargets = Literal["all", "qkv"]
Optimizer = Literal["adamw", "adamw-bf16", "adamw-8bit", "muon", "lion", "sgd-momentum", "sgd"]


@dataclass(frozen=True)
class OptimizerSpec:
    """What planner and engine know of an optimizer."""

    state_bytes: float
    """of its states per parameter"""
    moments: tuple[str, ...]
    """the states by torch's names"""
    format: Literal["fp32", "bf16", "e4m3"] = "fp32"
    """of its states; e4m3 with a power of two for each row"""
    matrices: OptimizerSpec | None = None
    """what steps hidden matrices (specs/weights.py), where it is not what steps all other weights"""

    @property
    def all_moments(self) -> tuple[str, ...]:
        return self.moments + (self.matrices.moments if self.matrices is not None else ())

    def of(self, is_hidden_matrix: bool) -> OptimizerSpec:
        """What steps such a weight."""
        return self.matrices if is_hidden_matrix and self.matrices is not None else self

    def with_ema(self) -> OptimizerSpec:
        """With the bytes of a mean of the weights in fp32 (`Job.ema`) among its states."""
        return replace(
            self,
            state_bytes=self.state_bytes + EMA_BYTES,
            matrices=None if self.matrices is None else self.matrices.with_ema(),
        )


EMA, EMA_BYTES = "ema", 4  # its name among an optimizer's moments
ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq")
# Two fp32 moments for AdamW (Kingma 2015; the playbook's `optimstates`), the same in bf16 or in 8 bits (Dettmers 2022), one
# fp32 moment for momentum, for Muon's matrices (Jordan 2024) and for Lion (Chen 2023).
OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw": OptimizerSpec(8, ADAMW_MOMENTS),
    "adamw-bf16": OptimizerSpec(4, ADAMW_MOMENTS, "bf16"),
    "adamw-8bit": OptimizerSpec(2, ADAMW_MOMENTS, "e4m3"),
    "muon": OptimizerSpec(8, ADAMW_MOMENTS, matrices=OptimizerSpec(4, ("momentum_buffer",))),
    "lion": OptimizerSpec(4, ("exp_avg",)),
    "sgd-momentum": OptimizerSpec(4, ("momentum_buffer",)),
    "sgd": OptimizerSpec(0, ()),
}


class Job(FrozenSpec):
    """Model, cluster, sequence length, tokens per batch, precision, optimizer, total tokens."""

    model: Model
    cluster: Cluster
    seq: int = Field(ge=1, le=2**30, strict=True, examples=[8192], description="sequence length in tokens")
    # Every divisor of the batch is tried as a micro-batch: 2^40 tokens, ten thousand times the largest published, stay quick.
    batch_tokens: int = Field(ge=1, le=2**40, strict=True, examples=[4194304], description="tokens in one optimizer step")
    precision: Precision = Field("bf16", description="of the matmuls; weights have an fp32 master unless fp32")
    gradients: Literal["fp32", "bf16"] = Field("fp32", description="in which gradients are accumulated and reduced")
    optimizer: Optimizer = Field("adamw", description="the optimizer, whose states count in the memory")
    ema: bool = Field(
        False, strict=True, description="whether a moving mean of the weights is kept beside them, which counts in the memory"
    )
    framework: Framework = Field(
        default_factory=lambda given: Framework.own(given["cluster"].gpu.name if "cluster" in given else ""),
        description="the engine that runs it: fusions, kernels, overlap; ours unless another is named",
    )
    attention: Literal["flash", "plain"] = Field("flash", description="plain materialises the score matrix")
    dropout: bool = Field(False, strict=True, description="keeps the masks of GPT-era dropout in memory")
    adapter_rank: int | None = Field(
        None,
        ge=1,
        le=8192,
        strict=True,
        examples=[16],
        description="rank of low-rank adapters (LoRA), which alone are trained: all other weights are frozen; null: none",
    )
    adapter_targets: AdapterTargets = Field(
        "all",
        description="adapters beside every matrix of attention, dense MLP and shared experts, or of the q, k and v projections "
        "alone, with latent attention those to and from the latents; routed experts and routers have none",
    )
    total_tokens: int | None = Field(
        None, ge=1, le=2**62, strict=True, examples=[15 * 10**12], description="of the whole training, for days and cost"
    )

    @model_validator(mode="after")
    def _the_gpu_has_the_precision(self) -> Self:
        gpu = self.cluster.gpu
        if self.precision not in gpu.peak_tflops:
            known = [name for name in get_args(Precision) if name in gpu.peak_tflops]
            advice = f"try {' or '.join(known)}" if known else "give cluster.gpu.peak_tflops a bf16"
            raise ValueError(f"job.precision is {self.precision} but {gpu.name} does not compute in it: {advice}")
        model = self.model
        if self.adapter_rank is not None and model.recurrence:
            raise ValueError(
                f"job.adapter_rank is {self.adapter_rank} but {model.name or 'the model'} has {model.recurrence}, "
                "whose training with adapters is not modelled: try null"
            )
        if self.adapter_rank is not None and model.mtp_depth:
            raise ValueError(
                f"job.adapter_rank is {self.adapter_rank} but {model.name or 'the model'} predicts several tokens, which "
                "adapters are not trained for: try model.mtp_depth=0"
            )
        if model.positions == "learned" and model.max_positions is not None and self.seq > model.max_positions:
            raise ValueError(
                f"job.seq is {self.seq} but {model.name or 'the model'} has {model.max_positions} learned positions: "
                f"try {model.max_positions}"
            )
        return self

    @property
    def sequences(self) -> int:
        """Sequences in one global batch: the nearest whole number, at least one."""
        return max(1, round(self.batch_tokens / self.seq))

    @property
    def optimizer_spec(self) -> OptimizerSpec:
        """The optimizer, with the mean of the weights among its bytes."""
        spec = OPTIMIZERS[self.optimizer]
        return spec.with_ema() if self.ema else spec

    @property
    def state_bytes(self) -> float:
        """Of the optimizer's states per parameter, in the mean over the model."""
        spec = self.optimizer_spec
        if spec.matrices is None:
            return spec.state_bytes
        matrices = self.model.hidden_matrix_elements / self.model.parameters
        return matrices * spec.matrices.state_bytes + (1 - matrices) * spec.state_bytes

    @property
    def peak_flops(self) -> float:
        return self.cluster.gpu.peak_tflops[self.precision] * 1e12

    @property
    def mfu_convention(self) -> str:
        """What an MFU that is shown counts, and what it is a share of."""
        return f"MFU: causal attention, of the {self.precision} peak of {self.peak_flops / 1e12:,.0f} TFLOP/s"

    def changed(self, **fields: object) -> Job:
        unknown = set(fields) - set(Job.model_fields)
        if unknown:
            raise SpecError(f"job has no field '{min(unknown)}': known: {', '.join(Job.model_fields)}")
        return build(Job, {**dict(self), **fields}, "job")

    def with_network_gb_s(self, rate: float) -> Job:
        """The same job on a network of that rate, GB/s per GPU and direction."""
        return self.changed(cluster=build(Cluster, {**dict(self.cluster), "network_gb_s": rate}, "cluster"))

    def with_expert_imbalance(self, imbalance: float) -> Job:
        """The same job with the busiest expert rank at so many times the mean tokens."""
        if self.model.moe is None:
            raise SpecError(f"expert imbalance {imbalance:g} does not apply: {self.model.name} has no experts, so leave it out")
        efficiency = {**dict(self.cluster.efficiency), "expert_imbalance": imbalance}
        return self.changed(cluster=build(Cluster, {**dict(self.cluster), "efficiency": efficiency}, "cluster"))
