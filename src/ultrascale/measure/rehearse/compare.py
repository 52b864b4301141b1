"""A rehearsal beside the Estimate, term by term: bytes by owner, FLOPs, and what each technique sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ultrascale.cost import flops
from ultrascale.cost.chunk_progress import most_gradients
from ultrascale.cost.columns import LayoutColumns
from ultrascale.cost.estimate import estimate
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.layout_rows import LayoutRows
from ultrascale.cost.memory import alone, peak_parts
from ultrascale.cost.operators import layer_matmuls
from ultrascale.cost.peaks import peaks
from ultrascale.cost.traffic import of_stage
from ultrascale.measure.rehearse.rehearsal import Rehearsal
from ultrascale.measure.rehearse.request import engine_of
from ultrascale.parallel.mesh import RankCoordinates
from ultrascale.specs.estimate import Estimate
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.plan import Plan
from ultrascale.specs.training import Training
from ultrascale.specs.units import GIB
from ultrascale.train.kernels import choose

STATES = ("parameters", "master", "gradients", "optimizer")
TECHNIQUES = ("tensor", "context", "expert", "pipeline", "data", "zero", "bookkeeping")
EAGER = "operators run one by one, as on a CPU: on a GPU our kernels keep less"
COMPILED = "blocks run operator by operator, which torch.compile would fuse: they hold more for a moment than it would"
BALANCED = "experts are chosen equally often, in the rehearsal and in the prediction beside it"
EMULATED = "fp8 is emulated: casts and products hold what a GPU's do not, so that activations come out too large"


@dataclass(frozen=True)
class RehearsedTerm:
    label: str
    predicted: float
    rehearsed: float
    unit: str
    """B: bytes held; sent: bytes sent; FLOP"""

    @property
    def difference(self) -> float:
        """The prediction's, relative to the rehearsal."""
        if not self.rehearsed:
            return 0.0 if not self.predicted else float("inf")
        return self.predicted / self.rehearsed - 1


@dataclass(frozen=True)
class MemoryRoom:
    """What the fullest of the ranks that were rehearsed takes of its GPU's memory."""

    stage: int
    tensors_gib: float
    beside_gib: float
    """context, communicators and the allocator's slack: predicted, unless a GPU told"""
    capacity_gib: float
    planned_gib: float
    """what the plan's own estimate says of that stage"""
    planned_for: str
    """the engine that the plan's estimate counts, and the one that was rehearsed"""
    engine: str

    @property
    def needs_gib(self) -> float:
        return self.tensors_gib + self.beside_gib

    @property
    def fits(self) -> bool:
        return self.needs_gib <= self.capacity_gib


@dataclass(frozen=True)
class Answer:
    """Rehearsals of a plan and what stands beside them."""

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


def answer(plan: Plan, found: Sequence[Rehearsal], device: str, kernels: str) -> Answer:
    job, layout = plan.job, plan.layout
    predicted = prediction(job, layout, kernels)
    return Answer(job, layout, device, found, predicted, room(plan, predicted, found), notes(job, layout, device, kernels))


def room(plan: Plan, predicted: Estimate, found: Sequence[Rehearsal]) -> MemoryRoom:
    fullest = max(found, key=lambda one: one.peak)
    stage, measured = fullest.place.pp, fullest.memory.runtime
    beside = predicted.memory[stage].memory.runtime if measured is None else measured
    planned = plan.estimate.memory[stage].memory.total
    engines = plan.job.framework.name, engine_of(fullest.kernels).name
    return MemoryRoom(stage, fullest.peak / GIB, beside / GIB, plan.job.cluster.gpu.memory_gib, planned / GIB, *engines)


def prediction(job: Job, layout: Layout, kernels: str = "eager") -> Estimate:
    """Of our engine as it is rehearsed: its own preset, and experts that are chosen equally often."""
    return estimate(even(job).changed(framework=engine_of(kernels)), layout)


def even(job: Job) -> Job:
    constants = job.cluster.efficiency.model_copy(update={"expert_imbalance": 1.0})
    return job.changed(cluster=job.cluster.model_copy(update={"efficiency": constants}))


def notes(job: Job, layout: Layout, device: str, kernels: str) -> list[str]:
    """What is not as it would be in a run."""
    if device != "meta":
        return []
    told = list[str]()
    if kernels == "eager":
        told += [EAGER] if job.cluster.gpu.name != "cpu" else []
    else:
        chosen = choose(job, layout, Training(), "cuda")
        told += [COMPILED] if chosen.compiled and not chosen.fused else []
    if job.precision == "fp8":
        told.append(EMULATED)
    if job.model.moe is not None:
        told.append(BALANCED)
    return told


def compared(job: Job, layout: Layout, predicted: Estimate, seen: Rehearsal) -> list[RehearsedTerm]:
    """Every term that either side has."""
    law = predicted.memory[seen.place.pp].memory
    job = even(job).changed(framework=engine_of(seen.kernels))
    # Gradients are counted when all of them are there, which need not be at the peak.
    as_made = job.framework.fused_blocks and bool(alone(job, LayoutColumns.of([layout]))[0])
    held = law.model_copy(update={"gradients": 0.0 if as_made else whole_gradients(job, layout, seen.place.pp)})
    terms = [RehearsedTerm(owner, getattr(held, owner), getattr(seen.memory, owner), "B") for owner in STATES]
    # What is on its way and what waits for backward look alike from outside: they are compared together.
    moving = law.activations + law.buffers + gone_at_peak(job, layout, seen.place.pp) + as_made * law.gradients
    terms.append(RehearsedTerm("activations, buffers", moving, seen.memory.activations + seen.memory.buffers, "B"))
    tensors = sum(getattr(law, owner) for owner in (*STATES, "activations", "buffers"))
    terms.append(RehearsedTerm("all tensors at the peak", tensors, seen.peak, "B"))
    terms.append(RehearsedTerm("FLOPs", predicted_flops(job, layout, seen.place), sum(seen.flops.values()), "FLOP"))
    sent = list(of_stage(job, layout, ClusterRates(job), seen.place.pp))
    for technique in TECHNIQUES:
        said = sum(one.bytes for one in sent if one.technique == technique)
        terms.append(RehearsedTerm(f"sent by {technique}", said, seen.sent(technique), "sent"))
    return [term for term in terms if term.predicted or term.rehearsed]


def gone_at_peak(job: Job, layout: Layout, stage: int) -> float:
    """Parameters that the peak does without: they are compared as a rank has most of them, and the law's buffers lack them."""
    return peaks(LayoutRows.of(job, layout))[stage].gone


def whole_gradients(job: Job, layout: Layout, stage: int) -> float:
    view = LayoutRows.of(job, layout)
    if layout.zero and layout.shards > 1:
        return most_gradients(view, stage)
    return float(peak_parts(job, view.ranks, view.share).state.gradients[stage])


def predicted_flops(job: Job, layout: Layout, place: RankCoordinates) -> float:
    """Of a step on one rank, by the products that the cost model times and attention's causal half."""
    view = LayoutRows.of(job, layout)
    model, row, share = job.model, view.row, view.share
    tokens = float(row.tokens(job.seq)[0])
    stage = place.pp
    scores = flops.score_flops(model, job.seq, causal=True) * tokens / layout.tp
    if layout.cp > 1 and layout.context_parallel in ("ring", "allgather"):  # later slices of the sequence see more of it
        scores *= (2 * place.cp + 1) / layout.cp
    total = 3 * float(share.head[stage]) * flops.head_flops(model) * tokens / layout.tp
    for layers, moe in ((share.dense_layers, False), (share.moe_layers, True)):
        count = float(np.broadcast_to(layers, layout.pp)[stage])
        if not count:
            continue
        products = {product.name: float(np.sum(product.flops)) for product in layer_matmuls(job, row, moe)}
        # torch.utils.checkpoint stops at the last tensor that backward asks for, which the last product does not make. With
        # experts more follows on a shared one's last product.
        again = 0.0
        if layout.recompute == "full":
            again = sum(products.values()) + scores - (0.0 if moe else products.get("mlp down", 0.0))
        elif layout.recompute == "selective":
            again = products.get("shared expert down", 0.0) if moe else 0.0
        total += count * (3 * (sum(products.values()) + scores) + again)
    return total * layout.gas
