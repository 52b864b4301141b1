"""Estimate: what is predicted for one layout. A Measurement will carry the same fields, so that comparing is a subtraction.

Bytes are bytes, times are seconds of one optimizer step; names end in their unit.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from ultrascale.specs.units import GIB

OWNERS = ("parameters", "master", "gradients", "optimizer", "activations", "buffers", "runtime")
CAUSES = (
    "matmul_s",
    "attention_s",
    "memory_bound_s",
    "recompute_s",
    "launch_s",
    "tensor_s",
    "context_s",
    "expert_s",
    "zero_s",
    "data_s",
    "send_s",
    "bubble_s",
    "optimizer_s",
    "offload_s",
    "overhead_s",
)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Memory(_Frozen):
    """Bytes on one GPU by owner."""

    parameters: float
    """the copy that computes: bf16, or fp32 when training in fp32"""
    master: float
    """the fp32 copy that the optimizer steps, in mixed precision"""
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    """gathered ZeRO-3 layers, gradients in flight, gathered sequences, exchanged keys and values, received activations"""
    runtime: float
    """CUDA context, communicators, allocator slack"""

    @property
    def total(self) -> float:
        return float(sum(getattr(self, owner) for owner in OWNERS))


class StageMemory(_Frozen):
    """The peak of one pipeline rank: every tp, cp and dp rank of that stage holds the same."""

    stage: int
    layers: int
    in_flight: float
    """micro-batches whose activations the stage holds at its peak"""
    memory: Memory
    moment: str

    @property
    def total_gib(self) -> float:
        return self.memory.total / GIB


class ActivationItem(_Frozen):
    """What one module keeps for backward on the peak stage, all layers and micro-batches in flight together."""

    module: str
    bytes: float


class Time(_Frozen):
    """One step by cause, as the slowest pipeline rank lives it; communication counts only where nothing hides it."""

    matmul_s: float
    attention_s: float
    memory_bound_s: float
    recompute_s: float
    launch_s: float
    tensor_s: float
    context_s: float
    expert_s: float
    zero_s: float
    data_s: float
    send_s: float
    bubble_s: float
    optimizer_s: float
    offload_s: float
    overhead_s: float

    @property
    def total(self) -> float:
        return float(sum(getattr(self, cause) for cause in CAUSES))


class Traffic(_Frozen):
    """One technique's communication on one GPU in one step."""

    technique: str
    collective: str
    group: int
    per_domain: int
    """members of the group inside one fast-link domain"""
    bytes: float
    """sent by one GPU over its links"""
    calls: float
    time_s: float
    exposed_s: float


class Estimate(_Frozen):
    step_time_s: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    """model FLOPs with full attention (Chowdhery 2022, the most printed convention) over the peak"""
    hfu: float
    """the same with recomputation counted"""
    mfu_causal: float
    hfu_causal: float
    model_tflops_per_gpu: float
    peak_gib: float
    capacity_gib: float
    fits: bool
    peak_stage: int
    peak_moment: str
    first_step_peak_gib: float
    """before the first optimizer step its states do not exist"""
    bubble_fraction: float
    memory: tuple[StageMemory, ...]
    time: Time
    traffic: tuple[Traffic, ...]
    activations: tuple[ActivationItem, ...]
    train_days: float | None
    gpu_hours: float | None
    cost_usd: float | None
    cost_usd_per_billion_tokens: float | None
    notes: tuple[str, ...]
    """what was assumed, borrowed or extrapolated"""

    @property
    def headroom_gib(self) -> float:
        return self.capacity_gib - self.peak_gib
