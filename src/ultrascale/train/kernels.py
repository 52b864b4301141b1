"""Kernel selection: which of our kernels a rank runs, by job, layout and device. None of them changes what is computed."""

from __future__ import annotations

from dataclasses import dataclass

from ultrascale.cost import communication
from ultrascale.cost.columns import LayoutColumns
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.legality import fused_blocks_problem
from ultrascale.cost.network import mesh
from ultrascale.schedules import REGISTRY
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.training import ExpertOverlap, Training
from ultrascale.train import cuda_graphs
from ultrascale.train.supported import left_in_bf16


@dataclass(frozen=True)
class Kernels:
    """The selected kernels. With all off, the plain model runs eagerly."""

    fused: bool = False
    """blocks with joined GEMMs and fused kernels between them (kernels/fused.py)"""
    compiled: bool = False
    """torch.compile for blocks and head that are not fused"""
    loss: bool = False
    """the loss in chunks, together with its gradients (kernels/loss.py)"""
    adamw: bool = False
    """fused AdamW with split masters (kernels/adamw_triton.py, kernels/split_master.py)"""
    as_made: bool = False
    """gradients stay in autograd's tensors, without buckets (SingleMicrobatchGrads in parallel/data.py)"""
    recorded: bool = False
    """steps are CUDA graphs (train/cuda_graphs.py)"""


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
        # fp16 must scale the loss before gradients are computed.
        loss=layout.tp == 1 and job.precision != "fp16" and not split,
        adamw=adamw,
        # One micro-batch on one GPU: nothing is accumulated, and our AdamW reads gradients in any dtype.
        as_made=adamw and layout.gpus == layout.gas == 1,
        recorded=cuda_graphs.why_not(job, layout, training) is None,
    )


def why_not_fused(job: Job, layout: Layout, training: Training) -> str | None:
    """Why a GPU runs plain blocks, compiled if possible, instead of fused ones; None if it runs fused ones.

    Fused blocks already drop all that selective recomputation would; full recomputation stops early only in plain ones.
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
    return fused_blocks_problem(job.model, job.seq)


def expert_overlap(job: Job, layout: Layout, training: Training, device: str) -> ExpertOverlap:
    """What experts compute during the all-to-all; `auto` follows the cost model (cost/communication.py)."""
    if training.expert_overlap != "auto":
        return training.expert_overlap
    if device != "cuda" or layout.ep == 1 or job.model.moe is None:
        return "none"
    engine = job.changed(framework=Framework.load("ultrascale-gpu"))
    row, machine = LayoutColumns.of([layout]), ClusterRates(engine)
    return "rows" if communication.local_tokens_first(engine, row, mesh(row, machine.cluster), machine)[0] else "gradients"


def _splits(layout: Layout) -> bool:
    return layout.pp > 1 and REGISTRY[layout.schedule].split_backward
