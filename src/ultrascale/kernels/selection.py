"""Kernel selection: which of our kernels a rank runs, by job, layout and device. No torch.

None of them changes what is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from ultrascale.cost.memory.states import can_compile, delta_rule_problem, fused_blocks_problem
from ultrascale.schedules import REGISTRY
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.training import FP8_MULTIPLE, FP8_TOKENS, Training


@dataclass(frozen=True)
class Kernels:
    """The selected kernels. With all off, the plain model runs eagerly."""

    fused: bool = False
    """blocks with joined GEMMs and fused kernels between them (kernels/fused.py)"""
    compiled: bool = False
    """torch.compile for blocks and head that are not fused"""
    loss: bool = False
    """the loss in chunks, together with its gradients (kernels/loss.py; where tp cuts it parallel/vocab_loss.py)"""
    delta_rule: bool = False
    """linear attention by Triton kernels (kernels/delta_rule.py)"""
    adamw: bool = False
    """fused AdamW with split masters (kernels/adamw_triton.py, kernels/split_master.py)"""
    single_microbatch: bool = False
    """gradients stay in autograd's tensors, without buckets (SingleMicrobatchGrads in parallel/data.py)"""
    cuda_graphs: bool = False
    """steps are CUDA graphs (kernels/cuda_graphs.py)"""


def choose(job: Job, layout: Layout, training: Training, device: str) -> Kernels:
    if device != "cuda" or training.kernels == "eager":
        return Kernels()
    whole = layout.tp == layout.cp == 1 and not _splits(layout)
    if training.kernels == "compile":
        return Kernels(compiled=whole and job.model.recurrence is None)
    adamw = job.optimizer == "adamw" and layout.offload == "none"
    return Kernels(
        fused=why_not_fused(job, layout, training) is None,
        compiled=whole and can_compile(job),
        # fp16 must scale the loss before gradients are computed; a cap is not part of the chunked loss.
        loss=job.precision != "fp16" and job.model.logits_softcap is None,
        delta_rule=delta_rule_problem(job) is None,
        adamw=adamw,
        # One micro-batch on one GPU: nothing is accumulated, and our AdamW reads gradients in any dtype.
        single_microbatch=adamw and layout.gpus == layout.gas == 1,
        cuda_graphs=why_not_graphed(job, layout, training) is None,
    )


def why_not_fused(job: Job, layout: Layout, training: Training) -> str | None:
    """Why a GPU runs plain blocks, compiled if possible, instead of fused ones; None if it runs fused ones."""
    if training.kernels != "fused":
        return f"train.kernels is {training.kernels}"
    if job.precision == "fp8" and training.fp8_scaling != "tensor":
        return f"fp8 has a scale per {training.fp8_scaling}"
    if plain := left_in_bf16(job, layout, training.model_copy(update={"fp8_keep": "head"})):
        return plain
    return fused_blocks_problem(job)


def why_not_chunked(job: Job, layout: Layout, training: Training, device: str) -> str | None:
    """Why train.tp_chunks has no effect; None if GEMMs run in chunks."""
    if layout.tp == 1:
        return "layers are not cut (tp = 1)"
    if not layout.sequence_parallel:
        return "without sequence parallelism nothing is gathered"
    if device != "cuda":
        return "blocks are fused on a GPU alone"
    if why := why_not_fused(job, layout, training):
        return f"blocks are not fused: {why}"
    return "matmuls in fp8 take whole operands" if job.precision == "fp8" else None


def why_not_graphed(job: Job, layout: Layout, training: Training) -> str | None:
    """Why steps cannot be captured as CUDA graphs; None if they can."""
    if training.graphs == "never":
        return "train.graphs is never"
    if layout.pp > 1:
        return f"the layout has {layout.pp} pipeline stages, and their messages are not captured"
    if layout.data_parallel == "ddp" and layout.gpus > 1 and not layout.zero:
        return "torch's DistributedDataParallel reduces gradients"
    if training.kernels != "fused":
        return f"train.kernels is {training.kernels}"
    if job.model.moe is not None:
        return "experts' loads are read in every step"
    if job.precision == "fp16":
        return "fp16's loss scale changes"
    if job.optimizer != "adamw" or layout.offload != "none":
        return "the optimizer is torch's"
    if training.document_mask:
        return "attention's mask is made anew for each batch"
    return None


def left_in_bf16(job: Job, layout: Layout, training: Training) -> str | None:
    """Which GEMMs stay in bf16 because of their sizes on one rank; train.fp8_keep excludes others."""
    if job.precision != "fp8":
        return None
    model, tp, scaling = job.model, layout.tp, training.fp8_scaling
    hidden, q, kv = model.hidden, model.q_dim // tp, model.kv_dim // min(tp, model.kv_heads)
    inner = model.ffn // tp
    if model.moe is not None and model.moe.shared_experts:
        inner = model.moe.shared_expert_ffn // tp
    sizes = {"q": (hidden, q), "k and v": (hidden, kv), "out": (hidden, q), "gate, up and down": (hidden, inner)}
    if training.fp8_keep == "none":
        sizes["head"] = (hidden, model.vocab // tp)
    multiple, tokens = FP8_MULTIPLE[scaling], layout.mbs * job.seq // layout.cp
    odd = {name: pair for name, pair in sizes.items() if any(size % multiple for size in pair)}
    if odd:
        words = ", ".join(f"{name} ({rows} × {columns})" for name, (rows, columns) in odd.items())
        return f"fp8 scaled by {scaling} takes sizes that are multiples of {multiple}: in bf16 stay {words}"
    if tokens % FP8_TOKENS[scaling]:
        return (
            f"fp8 scaled by {scaling} sums over multiples of {FP8_TOKENS[scaling]} tokens, here they are {tokens}: "
            "gradients of weights are made in bf16"
        )
    return None


def _splits(layout: Layout) -> bool:
    return layout.pp > 1 and REGISTRY[layout.schedule].split_backward
