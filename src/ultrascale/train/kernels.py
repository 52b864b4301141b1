"""Which of our own kernels a rank runs, by job, layout and device. None of them changes what is computed."""

from __future__ import annotations

from dataclasses import dataclass

from ultrascale.cost import expert, fused
from ultrascale.cost.columns import LayoutColumns
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.mesh import mesh
from ultrascale.schedules import REGISTRY
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.training import ExpertOverlap, Training
from ultrascale.train import cuda_graphs
from ultrascale.train.supported import left_in_bf16


@dataclass(frozen=True)
class Kernels:
    """All of them off is the plain model, run operator by operator."""

    fused: bool = False
    """blocks with joined products and kernels between them (kernels/fused.py)"""
    compiled: bool = False
    """torch.compile for blocks and head, where they are not fused"""
    loss: bool = False
    """the loss in chunks, with its gradients (kernels/loss.py)"""
    adamw: bool = False
    """AdamW in one pass, masters in halves (kernels/adamw_triton.py, kernels/split_master.py)"""
    as_made: bool = False
    """gradients stay as backward makes them (parallel/data.py)"""
    recorded: bool = False
    """a step's launches as one (train/cuda_graphs.py)"""


def choose(job: Job, layout: Layout, training: Training, device: str) -> Kernels:
    if device != "cuda" or training.kernels == "eager":
        return Kernels()
    split = _splits(layout)
    compiled = layout.tp == layout.cp == 1 and not split
    if training.kernels == "compile":
        return Kernels(compiled=compiled)
    adamw = job.optimizer == "adamw" and layout.offload == "none"
    return Kernels(
        fused=why_not_fused(job, layout, training) is None,
        compiled=compiled,
        # fp16 must scale gradients before it makes them.
        loss=layout.tp == 1 and job.precision != "fp16" and not split,
        adamw=adamw,
        # One micro-batch on one GPU: a gradient is added to nothing, and our AdamW reads it in any format.
        as_made=adamw and layout.gpus == layout.gas == 1,
        recorded=cuda_graphs.why_not(job, layout, training) is None,
    )


def why_not_fused(job: Job, layout: Layout, training: Training) -> str | None:
    """Why a GPU runs the plain blocks, compiled where it can be, and not the fused ones; None: it runs those.

    Fused ones drop by themselves all that selective recomputation would; full recomputation ends early only in plain ones.
    """
    if training.kernels != "fused":
        return f"train.kernels is {training.kernels}"
    if layout.tp > 1 or layout.cp > 1:
        return f"layers are cut (tp = {layout.tp}, cp = {layout.cp})"
    if _splits(layout):
        return f"{layout.schedule} splits their backward"
    if layout.recompute == "full":
        return "they are recomputed in full"
    if job.precision == "fp8" and training.fp8_scaling != "tensor":
        return f"fp8 has a scale per {training.fp8_scaling}"
    if plain := left_in_bf16(job, layout, training.model_copy(update={"fp8_keep": "head"})):
        return plain
    if training.document_mask:
        return "attention stays within documents"
    return fused.why_not(job.model, job.seq)


def expert_overlap(job: Job, layout: Layout, training: Training, device: str) -> ExpertOverlap:
    """What experts compute while rows travel, chosen as the law does where it is not said."""
    if training.expert_overlap != "auto":
        return training.expert_overlap
    if device != "cuda" or layout.ep == 1 or job.model.moe is None:
        return "none"
    engine = job.changed(framework=Framework.load("ultrascale-gpu"))
    row, machine = LayoutColumns.of([layout]), ClusterRates(engine)
    return "rows" if expert.rows_first(engine, row, mesh(row, machine.cluster), machine)[0] else "gradients"


def _splits(layout: Layout) -> bool:
    return layout.pp > 1 and REGISTRY[layout.schedule].split_backward
