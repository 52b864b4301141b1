"""Measurement: what was measured of a run. Its fields are those of the Estimate, so that the two can be subtracted."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from ultrascale.specs.estimate import OWNERS
from ultrascale.specs.files import read_mapping, write_text
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.validate import FrozenSpec, build


class MeasuredMemory(FrozenSpec):
    """Bytes by owner at the peak of one step."""

    parameters: float
    master: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    runtime: float | None = None

    @property
    def total(self) -> float:
        return sum(getattr(self, owner) or 0.0 for owner in OWNERS)


class MeasuredStage(FrozenSpec):
    stage: int
    layers: int
    memory: MeasuredMemory


class MeasuredTime(FrozenSpec):
    """Seconds of one step by cause, the mean over ranks; computing is what is left, and cannot be taken apart from outside."""

    computing_s: float | None = None
    """matmul_s + attention_s + memory_bound_s + recompute_s + launch_s of an Estimate"""
    tensor_s: float | None = None
    context_s: float | None = None
    expert_s: float | None = None
    zero_s: float | None = None
    data_s: float | None = None
    """waiting for gradients of other data ranks; null where torch itself reduces them (FSDP2, DDP): then in computing_s"""
    bubble_s: float | None = None
    """waiting for messages of other stages: bubble_s + send_s of an Estimate"""
    optimizer_s: float | None = None
    overhead_s: float | None = None
    """reading data"""


class Measurement(FrozenSpec):
    step_time_s: float
    """median of the steps after the first"""
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float | None = None
    hfu: float | None = None
    mfu_causal: float | None = None
    hfu_causal: float | None = None
    model_tflops_per_gpu: float
    peak_gib: float
    """tensors alive at the peak of a step, of the fullest rank; on a GPU, what the allocator handed out"""
    capacity_gib: float | None = None
    peak_stage: int
    memory: tuple[MeasuredStage, ...]
    time: MeasuredTime
    steps: int
    """how many the medians are taken over"""
    batch_tokens: int | None = None
    """in each of these steps, where train.batch_ramp or train.seq_stages have others than the job's"""
    seq: int | None = None
    """tokens of their sequences, where train.seq_stages has others than the job's"""
    processes: int
    device: str
    notes: tuple[str, ...] = ()

    def of_batch(self, job: Job, layout: Layout) -> tuple[Job, Layout]:
        """The job and the layout with the batch that was measured."""
        if self.batch_tokens is None:
            return job, layout
        gas, seq = self.batch_tokens // (layout.mbs * layout.dp * job.seq), self.seq or job.seq
        shorter = layout.changed(gas=gas, mbs=layout.mbs * job.seq // seq)
        return job.changed(batch_tokens=self.batch_tokens, seq=seq), shorter

    def save(self, path: Path) -> None:
        write_text(path, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        return build(cls, read_mapping(path, "measurement"), "measurement")
