"""Estimate: what is predicted for one layout. A Measurement will carry the same fields, so that comparing is a subtraction.

Bytes are bytes, times are seconds of one optimizer step; names end in their unit.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from ultrascale.specs.units import GIB
from ultrascale.specs.validate import FrozenSpec

OWNERS = {
    "parameters": "parameters",
    "master": "fp32 master",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "buffers": "buffers",
    "runtime": "runtime",
}
"""fields of Memory -> what tables call them"""
MEASURED_OWNERS = tuple(owner for owner in OWNERS if owner != "runtime")  # no tensor of a run belongs to the runtime

# Strict, as in Model: an edited file with "3" between quotes is a mistake. A whole number is a fine float.
Number = Annotated[float, Field(strict=True, examples=[1.0])]
Positive = Annotated[float, Field(strict=True, gt=0, examples=[1.0])]
Whole = Annotated[int, Field(strict=True, ge=0, examples=[1])]
Flag = Annotated[bool, Field(strict=True, examples=[True])]


class Memory(FrozenSpec):
    """Bytes on one GPU by owner."""

    parameters: Number
    """the copy that computes: bf16, or fp32 when training in fp32"""
    master: Number
    """the fp32 copy that the optimizer steps, in mixed precision"""
    gradients: Number
    optimizer: Number
    activations: Number
    buffers: Number
    """gathered ZeRO-3 layers, gradients in flight, gathered sequences, keys and values of other ranks, received activations"""
    runtime: Number
    """CUDA context, communicators, allocator slack"""

    @property
    def total(self) -> float:
        return float(sum(getattr(self, owner) for owner in OWNERS))


class StageMemory(FrozenSpec):
    """The peak of one pipeline rank: every tp, cp and dp rank of that stage holds the same."""

    stage: Whole
    layers: Whole
    in_flight: Number
    """micro-batches whose activations the stage holds at its peak"""
    memory: Memory
    moment: str

    @property
    def total_gib(self) -> float:
        return self.memory.total / GIB


class ActivationItem(FrozenSpec):
    """What one module keeps for backward on the peak stage, all layers and micro-batches in flight together."""

    module: str
    bytes: Number


class Time(FrozenSpec):
    """One step by cause, as the slowest pipeline rank lives it; communication counts only where nothing hides it."""

    matmul_s: Number
    attention_s: Number
    memory_bound_s: Number
    recompute_s: Number
    launch_s: Number
    tensor_s: Number
    context_s: Number
    expert_s: Number
    zero_s: Number
    data_s: Number
    send_s: Number
    bubble_s: Number
    optimizer_s: Number
    offload_s: Number
    overhead_s: Number

    @property
    def total(self) -> float:
        return float(sum(getattr(self, cause) for cause in CAUSES))


CAUSES = tuple(Time.model_fields)


class Traffic(FrozenSpec):
    """One technique's communication on one GPU in one step."""

    technique: str
    collective: str
    group: Whole
    per_domain: Whole
    """members of the group inside one fast-link domain"""
    bytes: Number
    """sent by one GPU over its links"""
    calls: Number
    time_s: Number
    exposed_s: Number


class EstimateRange(FrozenSpec):
    """Where the truth lies in eight of ten cases, from the errors of similar runs that no constant had seen."""

    step_time_low_s: Number
    step_time_high_s: Number
    peak_low_gib: Number
    peak_high_gib: Number
    fit_probability: Number
    based_on: str
    """which runs these are"""
    regime: str = ""
    """what the step depends on most: experts, host-bound, communication-bound or compute-bound"""
    outside: str = ""
    """why no measured runs are like this one, so that the range is wider; empty: some are"""

    @property
    def coverage(self) -> str:
        """The regime in words, and whether runs of it were measured."""
        kind = "with experts" if self.regime == "experts" else self.regime
        return f"{kind}; outside of what was measured: {self.outside}" if self.outside else kind


class Estimate(FrozenSpec):
    step_time_s: Positive
    tokens_per_s: Positive
    tokens_per_s_per_gpu: Number
    mfu: Number
    """model FLOPs with full attention (Chowdhery 2022, the most printed convention) over the peak"""
    hfu: Number
    """the same with recomputation counted"""
    mfu_causal: Number
    hfu_causal: Number
    model_tflops_per_gpu: Number
    peak_gib: Number
    capacity_gib: Positive
    fits: Flag
    peak_stage: Whole
    peak_moment: str
    first_step_peak_gib: Number
    """before the first optimizer step its states do not exist"""
    bubble_fraction: Number
    cache_flush: str = ""
    """what a step loses to the allocator's cache; empty: nothing"""
    memory: tuple[StageMemory, ...] = Field(min_length=1)
    time: Time
    traffic: tuple[Traffic, ...]
    activations: tuple[ActivationItem, ...]
    range: EstimateRange | None = None
    train_days: Number | None
    gpu_hours: Number | None
    cost_usd: Number | None
    cost_usd_per_billion_tokens: Number | None
    notes: tuple[str, ...]
    """what was assumed, borrowed or extrapolated"""

    @model_validator(mode="after")
    def _peak_is_a_stage(self) -> Self:
        if not 0 <= self.peak_stage < len(self.memory):
            raise ValueError(
                f"plan.estimate.peak_stage is {self.peak_stage} but memory lists {len(self.memory)} stages: try "
                f"{len(self.memory) - 1}"
            )
        return self

    @property
    def headroom_gib(self) -> float:
        return self.capacity_gib - self.peak_gib
