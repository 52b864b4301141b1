"""The few named constants between a data sheet and a clock. Everything a calibration may fit is here, and nothing else."""

from __future__ import annotations

from functools import cache

from pydantic import ConfigDict, Field

from ultrascale.specs.files import package_data
from ultrascale.specs.validate import FrozenSpec


class Efficiency(FrozenSpec):
    """How much of the data sheet a training step gets, on one kind of hardware.

    Defaults are documented in docs/time.md with their sources; `cluster.yaml` overrides any of them under `efficiency:`.
    """

    @classmethod
    @cache
    def measured(cls, gpu: str) -> Efficiency:
        """What was measured on GPUs of that kind; the defaults elsewhere."""
        return cls(**package_data("ultrascale.specs", "presets/efficiency.yaml").get(gpu, {}))

    # Strict and finite: "0.9" between quotes is a mistake in the file, and a share of a thousandth is one too.
    model_config = ConfigDict(strict=True)

    matmul: float | None = Field(
        None, ge=1e-3, le=4, examples=[0.95], description="of the measured matmul rate; None: what the kind sustains"
    )
    matmul_fp8: float | None = Field(
        None, ge=1e-3, le=2, examples=[1.1], description="the same for fp8; None: what the kind sustains"
    )
    matmul_ramp: float = Field(
        1.0, ge=0, le=10, description="of what the measured matmuls lose on narrow matrices; newer libraries lose less"
    )
    attention_forward: float | None = Field(
        None, ge=1e-3, le=1, examples=[0.6], description="of peak; None: the architecture's own figure"
    )
    attention_backward: float | None = Field(
        None, ge=1e-3, le=1, examples=[0.6], description="of peak; None: the architecture's own figure"
    )
    boost: float = Field(
        1.0, ge=1, le=4, description="highest clock over the one that matmuls in a row keep: what light work may gain"
    )
    memory_bandwidth: float = Field(0.87, ge=1e-3, le=1, description="of the data sheet, in memory-bound operators")
    kernel_launch_s: float = Field(5.0e-6, ge=0, le=1e-2, description="host time to launch one kernel")
    synchronous: bool = Field(
        False, strict=True, description="operators run in the host's own time, as on a CPU: nothing hides their launch"
    )
    softmax_gscores_s: float = Field(
        1.0, ge=1e-3, le=1e6, description="10⁹ scores of attention a second that a CPU's softmax passes over, forward"
    )
    link_latency_s: float | None = Field(
        None, ge=0, le=1, examples=[2e-6], description="per hop inside the fast domain; None: measured"
    )
    link_bandwidth: float | None = Field(
        None, ge=1e-3, le=1, examples=[0.8], description="of the data sheet; None: measured for this kind"
    )
    network_bandwidth: float = Field(0.80, ge=1e-3, le=1, description="of the NIC's line rate that a collective gets")
    network_latency_s: float = Field(1.2e-5, ge=0, le=1, description="per step of a ring between nodes")
    link_call_s: float = Field(
        0.0,
        ge=0,
        le=1,
        description="host time of a tensor-parallel collective in a node, per rank, where there are more nodes",
    )
    network_call_s: float = Field(2.5e-5, ge=0, le=1, description="the same of groups that span nodes")
    overlap: float = Field(0.90, ge=0, le=1, description="share of a hidden transfer's window that really hides it")
    overlap_slowdown: float = Field(0.08, ge=0, le=1, description="compute's slow-down while a transfer runs beside it")
    host_link: float = Field(0.80, ge=1e-3, le=1, description="of the PCIe or C2C data sheet, for offload")
    host_adam_gparams_s: float = Field(
        4.7, ge=1e-3, le=1e6, description="10⁹ parameters a second that one node's CPUs step with Adam"
    )
    expert_imbalance: float = Field(1.10, ge=1, le=64, description="busiest expert rank over the mean, in tokens")
    action_overhead_s: float = Field(1.0e-4, ge=0, le=1, description="host and synchronisation of one pipeline action")
    step_overhead_s: float = Field(0.005, ge=0, le=60, description="host work of a step: data, clipping's sync, logging")
    context_gib: float = Field(
        1.0, ge=0, le=1024, description="CUDA context, NCCL channels and cuBLAS workspaces of one process"
    )
    workspace_gib: float = Field(0.2, ge=0, le=1024, description="of context_gib: what the allocator itself hands out")
    cache_flush_s_per_gib: float = Field(
        0.16, ge=0, le=60, description="to free and allocate again, per micro-batch, what an allocator's cache lacks"
    )
    allocator_slack: float = Field(0.04, ge=0, le=1, description="of activations and buffers, lost to rounding and holes")
