"""Rehearse: run the training program of single ranks of a plan without their peers, and compare with the Estimate.

A request is checked before torch is loaded; rehearse_rank.py runs a rank.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING

import numpy as np

from ultrascale.cost import flops, muon
from ultrascale.cost.columns import LayoutColumns, rows_of
from ultrascale.cost.estimate import estimate
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.memory.estimate import most_gradients, peaks
from ultrascale.cost.memory.states import (
    accumulates_nothing,
    delta_rule_kernels,
    scatters_scores,
    selective_policy,
    stops_early,
    uses_fused_blocks,
)
from ultrascale.cost.operators import adapter_matmuls, last_matmul, layer_matmuls, selective_matmuls
from ultrascale.cost.stages import LayoutRows
from ultrascale.cost.traffic import of_stage
from ultrascale.launch.machine import cores
from ultrascale.specs.errors import SpecError
from ultrascale.specs.estimate import Estimate
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.measurement import MeasuredMemory
from ultrascale.specs.plan import Plan
from ultrascale.specs.training import Training
from ultrascale.specs.units import GIB
from ultrascale.train import supported

if TYPE_CHECKING:
    from ultrascale.parallel.mesh import RankCoordinates

DEVICES = ("meta", "cuda")
KERNELS = ("fused", "eager")
STATES = ("parameters", "master", "gradients", "optimizer")
TECHNIQUES = ("tensor", "context", "expert", "pipeline", "data", "zero", "muon", "bookkeeping")
EAGER = "operators run one by one, as on a CPU: on a GPU our kernels keep less"
COMPILED = "blocks run operator by operator, which torch.compile would fuse: they hold more for a moment than it would"
BALANCED = "experts are chosen equally often, in the rehearsal and in the prediction beside it"
EMULATED = "fp8 is emulated: casts and matmuls hold what a GPU's do not, so that activations come out too large"


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind in a step."""

    technique: str
    kind: str
    group: int
    where: str
    """forward, backward, gradients, loss, norm, optimizer"""
    calls: int
    bytes: int
    """that this rank sends, in all calls together"""


@dataclass(frozen=True)
class Rehearsal:
    """Memory, FLOPs and collectives of one rank in a step."""

    rank: int
    place: RankCoordinates
    alike: int
    """ranks of its stage, which are the same"""
    layers: int
    memory: MeasuredMemory
    """by owner at the peak; parameters and gradients at their own maximum"""
    peak: float
    """bytes of all tensors at the peak"""
    moment: str
    flops: dict[str, int]
    """by operator; attention counts its causal half, without recomputation in its backward kernel"""
    collectives: tuple[Collective, ...]
    microbatches: int
    """that were run; the others of the step repeat them"""
    kernels: str
    """fused or eager"""
    seconds: float = 0.0
    """that the rehearsal took"""
    kernels_s: dict[str, float] | None = None
    """on a GPU: time by kernel, of one step with so many micro-batches"""
    step_s: float | None = None
    """on a GPU: of that step; collectives take no time, since there is nobody to wait for"""

    def sent(self, technique: str, kind: str | None = None) -> int:
        return sum(one.bytes for one in self.collectives if one.technique == technique and kind in (None, one.kind))


def rehearse(
    job: Job,
    layout: Layout,
    ranks: Sequence[int] = (0,),
    device: str = "meta",
    progress: Callable[[str], None] = lambda _: None,
    kernels: str | None = None,
) -> list[Rehearsal]:
    """Rehearse these ranks: one after the other on a GPU, in parallel processes otherwise.

    `kernels`: fused or eager; None: as the plan's machines would run it.
    """
    check(job, layout, device)
    kernels = kernels_of(job, layout, device, kernels)
    from ultrascale.measure.rehearse_rank import rehearse_rank

    if device == "cuda":
        require_gpu()
    job = job.changed(framework=engine_of(kernels))
    workers = min(len(ranks), cores())
    if device == "cuda" or workers == 1:
        alone = (rehearse_rank(job, layout, rank, device, kernels) for rank in ranks)
        return [_announce(one, place, len(ranks), progress) for place, one in enumerate(alone)]
    # Frozen objects are skipped by the garbage collectors of workers.
    with ProcessPoolExecutor(workers, get_context("fork"), initializer=gc.freeze) as pool:
        # Early stages run the most micro-batches and should go first, which they do in the order of ranks.
        running = [pool.submit(rehearse_rank, job, layout, rank, device, kernels) for rank in ranks]
        done = [_announce(one.result(), place, len(ranks), progress) for place, one in enumerate(as_completed(running))]
    return sorted(done, key=lambda one: one.rank)


def _announce(one: Rehearsal, done: int, of: int, progress: Callable[[str], None]) -> Rehearsal:
    progress(f"{done + 1} of {of}: rank {one.rank} in {one.seconds:.1f} s")
    return one


def kernels_of(job: Job, layout: Layout, device: str, given: str | None = None) -> str:
    """fused or eager: as asked, or fused where the plan has GPUs. Without a GPU fp8 is emulated where blocks are not fused."""
    if given is not None and given not in KERNELS:
        raise SpecError(f"--kernels is {given!r} but a rehearsal runs the engine's fused kernels or eager operators: try fused")
    emulated = device == "meta" and _emulates(job, layout)
    if emulated and given == "fused":
        raise SpecError(
            "--kernels is fused but without a GPU fp8 is emulated operator by operator: try eager, or --device cuda"
        )
    return given or ("eager" if emulated or job.cluster.gpu.name == "cpu" else "fused")


def _emulates(job: Job, layout: Layout) -> bool:
    """Whether fp8 GEMMs are those of plain modules, whose casts have no stand-ins."""
    from ultrascale.kernels.selection import why_not_fused

    return job.precision == "fp8" and why_not_fused(job, layout, Training()) is not None


def engine_of(kernels: str) -> Framework:
    """Our engine with these kernels, as the cost model knows it."""
    return Framework.load("ultrascale" if kernels == "fused" else "ultrascale-eager")


def check_device(device: str) -> None:
    if device not in DEVICES:
        raise SpecError(f"--device is {device!r} but a rehearsal runs on meta (no memory) or cuda (one GPU): try meta")


def require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise SpecError("--device is cuda but torch sees no GPU here: try --device meta")


def check(job: Job, layout: Layout, device: str) -> None:
    """SpecError for what cannot be rehearsed."""
    check_device(device)
    if layout.gpus != job.cluster.gpus:
        raise SpecError(
            f"layout.dp·tp·pp·cp is {layout.gpus} but plan.job.cluster has {job.cluster.gpus} GPUs: plan anew, or try "
            f"nodes: {max(1, layout.gpus // job.cluster.gpus_per_node)}"
        )
    supported.check(job, layout, Training())
    if layout.data_parallel == "ddp" and layout.data_ranks > 1 and not layout.zero:
        raise SpecError(
            "layout.data_parallel is ddp but torch's reducer waits for other ranks: rehearse with data_parallel: bucketed"
        )
    if device == "cuda" and layout.ep > 1:
        raise SpecError(
            f"layout.ep is {layout.ep} but on a GPU other ranks would have to tell how many rows they send: try --device meta"
        )


def ranks_of(layout: Layout, rank: int | None, stage: str | None) -> list[int]:
    """The ranks to run: one, or the first of one pipeline stage or of each."""
    if rank is not None and stage is not None:
        raise SpecError("--rank and --stage name ranks in two ways: give one of them, such as --stage all")
    each = layout.gpus // layout.pp
    if stage == "all":
        return [place * each for place in range(layout.pp)]
    if stage is not None:
        if not stage.isdecimal() or int(stage) >= layout.pp:
            raise SpecError(f"--stage is {stage!r} but the plan has stages 0 to {layout.pp - 1}: try all")
        return [int(stage) * each]
    if rank is not None and not 0 <= rank < layout.gpus:
        raise SpecError(f"--rank is {rank} but the plan has ranks 0 to {layout.gpus - 1}: try 0")
    return [rank or 0]


@dataclass(frozen=True)
class RehearsedTerm:
    label: str
    predicted: float
    rehearsed: float
    unit: str
    """B: bytes of memory; sent: bytes sent; FLOP"""

    @property
    def difference(self) -> float:
        """Of the prediction, relative to the rehearsal."""
        if not self.rehearsed:
            return 0.0 if not self.predicted else float("inf")
        return self.predicted / self.rehearsed - 1


@dataclass(frozen=True)
class MemoryRoom:
    """GPU memory of the fullest rehearsed rank."""

    stage: int
    tensors_gib: float
    beside_gib: float
    """CUDA context, communicators and allocator: predicted, unless measured on a GPU"""
    capacity_gib: float
    planned_gib: float
    """the plan's own estimate of that stage"""
    planned_for: str
    """the engine of the plan's estimate; `engine`: the one that was rehearsed"""
    engine: str

    @property
    def needs_gib(self) -> float:
        return self.tensors_gib + self.beside_gib

    @property
    def fits(self) -> bool:
        return self.needs_gib <= self.capacity_gib


@dataclass(frozen=True)
class RehearsalReport:
    """Rehearsals of a plan beside the predictions for them."""

    job: Job
    layout: Layout
    device: str
    found: Sequence[Rehearsal]
    predicted: Estimate
    room: MemoryRoom
    notes: Sequence[str]

    @property
    def fullest(self) -> Rehearsal:
        return max(self.found, key=lambda one: one.peak)

    def compared(self, one: Rehearsal) -> list[RehearsedTerm]:
        return compared(self.job, self.layout, self.predicted, one)


def report(plan: Plan, found: Sequence[Rehearsal], device: str, kernels: str) -> RehearsalReport:
    job, layout = plan.job, plan.layout
    predicted = prediction(job, layout, kernels)
    return RehearsalReport(
        job, layout, device, found, predicted, room(plan, predicted, found), notes(job, layout, device, kernels)
    )


def room(plan: Plan, predicted: Estimate, found: Sequence[Rehearsal]) -> MemoryRoom:
    fullest = max(found, key=lambda one: one.peak)
    stage, measured = fullest.place.pp, fullest.memory.runtime
    beside = predicted.memory[stage].memory.runtime if measured is None else measured
    planned = plan.estimate.memory[stage].memory.total
    engines = plan.job.framework.name, engine_of(fullest.kernels).name
    return MemoryRoom(stage, fullest.peak / GIB, beside / GIB, plan.job.cluster.gpu.memory_gib, planned / GIB, *engines)


def prediction(job: Job, layout: Layout, kernels: str = "eager") -> Estimate:
    """Of our engine as it is rehearsed: with balanced experts."""
    return estimate(without_imbalance(job).changed(framework=engine_of(kernels)), layout)


def without_imbalance(job: Job) -> Job:
    constants = job.cluster.efficiency.model_copy(update={"expert_imbalance": 1.0})
    return job.changed(cluster=job.cluster.model_copy(update={"efficiency": constants}))


def notes(job: Job, layout: Layout, device: str, kernels: str) -> list[str]:
    """In what a rehearsal differs from a run."""
    if device != "meta":
        return []
    found = list[str]()
    if kernels == "eager":
        found += [EAGER] if job.cluster.gpu.name != "cpu" else []
    else:
        from ultrascale.kernels.selection import choose

        selected = choose(job, layout, Training(), "cuda")
        found += [COMPILED] if selected.compiled and not selected.fused else []
    if job.precision == "fp8" and (kernels == "eager" or _emulates(job, layout)):
        found.append(EMULATED)
    if job.model.moe is not None:
        found.append(BALANCED)
    return found


def compared(job: Job, layout: Layout, predicted: Estimate, rehearsed: Rehearsal) -> list[RehearsedTerm]:
    """Every term that either side has."""
    law = predicted.memory[rehearsed.place.pp].memory
    job = without_imbalance(job).changed(framework=engine_of(rehearsed.kernels))
    # Gradients are compared when all of them exist, which need not be at the peak.
    single = job.framework.fused_blocks and bool(accumulates_nothing(job, LayoutColumns.of([layout]))[0])
    states = law.model_copy(update={"gradients": 0.0 if single else whole_gradients(job, layout, rehearsed.place.pp)})
    terms = [RehearsedTerm(owner, getattr(states, owner), getattr(rehearsed.memory, owner), "B") for owner in STATES]
    # A rehearsal cannot tell buffers from activations: they are compared together. Parameters that are freed at the peak are
    # compared at their maximum, and the law's buffers exclude them.
    freed = peaks(LayoutRows.of(job, layout))[rehearsed.place.pp].freed_parameters
    moving = law.activations + law.buffers + freed + single * law.gradients
    terms.append(RehearsedTerm("activations, buffers", moving, rehearsed.memory.activations + rehearsed.memory.buffers, "B"))
    tensors = sum(getattr(law, owner) for owner in (*STATES, "activations", "buffers"))
    terms.append(RehearsedTerm("all tensors at the peak", tensors, rehearsed.peak, "B"))
    terms.append(RehearsedTerm("FLOPs", predicted_flops(job, layout, rehearsed.place), sum(rehearsed.flops.values()), "FLOP"))
    sent = list(of_stage(job, layout, ClusterRates(job), rehearsed.place.pp))
    for technique in TECHNIQUES:
        predicted_bytes = sum(one.bytes for one in sent if one.technique == technique)
        terms.append(RehearsedTerm(f"sent by {technique}", predicted_bytes, rehearsed.sent(technique), "sent"))
    return [term for term in terms if term.predicted or term.rehearsed]


def whole_gradients(job: Job, layout: Layout, stage: int) -> float:
    view = LayoutRows.of(job, layout)
    if layout.zero and layout.shards > 1:
        return most_gradients(view, stage)
    return float(view.state.gradients[stage])


def _delta_rule_flops(job: Job, layout: Layout, layers: float, recomputed: float) -> float:
    """Of batched GEMMs in a step's micro-batch: forward, forward again within backward, its two GEMMs for each, and with
    recomputation of whatever kind forward once more. torch's counter sees the triangular system as GEMMs in backward alone, and
    nothing of our kernels.
    """
    linear = job.model.linear_attention
    if linear is None or delta_rule_kernels(job):
        return 0.0
    keys, values, chunk = linear.key_head_dim, linear.value_head_dim, flops.DELTA_CHUNK
    length = -(-job.seq // chunk) * chunk
    forward = 2.0 * chunk * (2 * keys + values) + 6 * keys * values
    # No gradient reaches the first state, and the last one's is nothing.
    backward = 3 * length * forward + 2 * length * chunk * (keys + values) - 8 * chunk * keys * values
    each = layers * (length * forward + backward) + recomputed * length * forward
    return linear.value_heads / (layout.tp * layout.cp) * layout.mbs * each


def _state_space_flops(job: Job, layout: Layout, layers: float, recomputed: float) -> float:
    """The same of Mamba-2's state space: forward, forward again within backward, and two GEMMs for each of its own."""
    mamba, chunk = job.model.mamba, flops.DELTA_CHUNK
    if mamba is None:
        return 0.0
    length = -(-job.seq // chunk) * chunk
    forward = length * flops.mamba_flops(job.model)
    return layout.mbs / (layout.tp * layout.cp) * (layers * 4 + recomputed) * forward


def predicted_flops(job: Job, layout: Layout, place: RankCoordinates) -> float:
    """Of a step on one rank: the GEMMs of the cost model and the causal half of attention."""
    view = LayoutRows.of(job, layout)
    model, row, share = job.model, view.row, view.share
    tokens = float(row.tokens(job.seq)[0])
    stage = place.pp
    # A window is a mask of the CPU's kernel, which computes all pairs: twice what the causal ones are.
    masks = model.masked_window(job.seq) is not None
    scores = tokens / layout.tp
    if model.mla is not None:  # values are padded to keys' width
        scores *= 2 * model.qk_head_dim / (model.qk_head_dim + model.v_head_dim)
    if layout.cp > 1 and layout.context_parallel in ("ring", "allgather"):  # later parts of the sequence attend to more of it
        scores *= (2 * place.cp + 1) / layout.cp
    frozen = job.adapter_rank is not None
    passes = 2 if frozen else 3
    total = passes * float(share.head[stage]) * flops.head_flops(model) * tokens / layout.tp
    fused = bool(uses_fused_blocks(job, row)[0])
    for kind, layers, kept in share.each():
        count, recomputed = float(layers[stage]), float(layers[stage] - kept[stage])
        if not count:
            continue
        masked = masks and kind.local
        each_score = (
            2 * flops.score_flops(model, job.seq, True, False) if masked else flops.mixer_flops(model, kind, job.seq, True)
        )
        moe, of_scores = kind.has_experts, scores * each_score if kind.mixer == "attention" else 0.0
        matmuls = {matmul.name: float(np.sum(matmul.flops)) for matmul in layer_matmuls(job, row, kind)}
        beside = [(matmul.name, float(np.sum(matmul.flops))) for matmul in adapter_matmuls(job, row, kind)] if frozen else []
        adapters = sum(found for _, found in beside)
        # torch.utils.checkpoint stops at the last tensor that backward needs, before the last GEMM. A shared expert's last GEMM
        # is followed by more operators.
        again = 0.0
        if layout.recompute == "full":
            early = bool(stops_early(job, row)[0]) and model.norm_placement == "pre" and not kind.predicts
            down = 0.0 if moe or not early else matmuls.get(last_matmul(kind), 0.0)
            again = sum(matmuls.values()) + of_scores + adapters - down
        elif layout.recompute == "selective" and (repeated := selective_matmuls(job, row, kind)):
            again = float(sum(np.sum(matmul.flops) for matmul in repeated))
        elif layout.recompute == "selective" and frozen:
            again = sum(found for name, found in beside if name == "adapter up") + matmuls.get("shared expert down", 0.0)
        elif layout.recompute == "selective" and selective_policy(job) == "attention":
            again = of_scores
        elif layout.recompute == "selective" and moe:
            again = 0.0 if kind.predicts else matmuls.get("shared expert down", 0.0)
        elif layout.recompute == "selective" and fused:
            again = matmuls["mlp up"]
        total += count * (passes * sum(matmuls.values()) + 3 * (of_scores + adapters)) + recomputed * again
        if moe and model.moe is not None and job.framework.routing_format == "fp32-gemm":
            sums = 2 * tokens * model.moe.top_k * model.hidden
            total += (passes * count + recomputed * (layout.recompute != "none")) * sums
        if moe and scatters_scores(job, row)[0]:
            total -= count * (passes - 1) * (1 - 1 / layout.tp) * matmuls["router"]
        if kind.mixer in ("linear", "mamba"):
            of_mixer = _delta_rule_flops if kind.mixer == "linear" else _state_space_flops
            total += of_mixer(job, layout, count, recomputed * (layout.recompute != "none"))
        if frozen and share.embedding[stage] and kind == model.kind(0):
            # Nothing asks for the gradient of the first layer's input.
            first = [name for name in ("qkv", "kv down", "q down", "q") if name in matmuls]
            total -= sum(matmuls[name] for name in first) + beside[0][1] + ("q" in matmuls) * beside[2][1]
    of_stage = rows_of(share, slice(stage, stage + 1))
    return total * layout.gas + float(muon.flops(job, row, of_stage)[0])
