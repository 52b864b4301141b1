"""Rehearse: the training program of one rank of a plan's world, run alone, before anybody has so many GPUs.

The engine builds and steps as it does in a run. What is not there: the other ranks (rehearse_world.py) and, unless a GPU is
asked for, the memory of tensors. What is seen on the way is counted (rehearse_watch.py) and stands beside the Estimate
(rehearse_compare.py).
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from typing import cast

import torch
from torch.distributed.fsdp import FSDPModule

from ultrascale.launch.cpu_rates import cores
from ultrascale.measure.rehearse.fake import QuickFakeTensorMode
from ultrascale.measure.rehearse.gpu import kernel_times, without_values
from ultrascale.measure.rehearse.kernels import as_on_a_gpu
from ultrascale.measure.rehearse.operator_tracker import CollectiveCall, OperatorTracker, StepPosition, watched
from ultrascale.measure.rehearse.repeat import ShortSchedule, cut, shorten
from ultrascale.measure.rehearse.request import check, engine_of, kernels_of
from ultrascale.measure.rehearse.world import (
    ConstantBatches,
    replaced,
    routed_rows,
    single_rank_world,
    unconnected_groups,
    without_memory,
)
from ultrascale.parallel.mesh import Mesh, RankCoordinates
from ultrascale.parallel.zero import FSDPGrads
from ultrascale.specs.errors import SpecError
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.measurement import MeasuredMemory
from ultrascale.specs.training import Training
from ultrascale.train import build
from ultrascale.train.build import COMPUTE, boundary_shape, schedule_of
from ultrascale.train.data import Batches
from ultrascale.train.engine import Engine
from ultrascale.train.memory import account


@dataclass(frozen=True)
class Collective:
    """One kind of exchange of a whole step."""

    technique: str
    kind: str
    group: int
    where: str
    """forward, backward, gradients, loss, norm, optimizer"""
    calls: int
    bytes: int
    """that this rank sends over its links, of all calls together"""


@dataclass(frozen=True)
class Rehearsal:
    """What one rank holds and does in a step."""

    rank: int
    place: RankCoordinates
    alike: int
    """ranks of its stage, which hold and do the same"""
    layers: int
    memory: MeasuredMemory
    """by owner at the peak, but of parameters and gradients the most there were"""
    peak: float
    """bytes of all tensors then"""
    moment: str
    flops: dict[str, int]
    """by operator; the causal half of attention, without what its kernel computes again in backward"""
    collectives: tuple[Collective, ...]
    microbatches: int
    """that were run; the rest of the step's repeat what these do"""
    kernels: str
    """fused or eager"""
    seconds: float = 0.0
    """that the rehearsal took"""
    kernels_s: dict[str, float] | None = None
    """on a GPU: time by kernel, of one step of so many micro-batches"""

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
    """Each of these ranks, one after the other on a GPU, as many at a time as there are cores without one.

    `kernels`: fused or eager; not told: as the plan's machines would run it.
    """
    check(job, layout, device)
    kernels = kernels_of(job, device, kernels)
    if device == "cuda" and not torch.cuda.is_available():
        raise SpecError("--device is cuda but torch sees no GPU here: try --device meta")
    job = job.changed(framework=engine_of(kernels))
    workers = min(len(ranks), cores())
    if device == "cuda" or workers == 1:
        alone = (rehearse_rank(job, layout, rank, device, kernels) for rank in ranks)
        return [_told(one, place, len(ranks), progress) for place, one in enumerate(alone)]
    # What was imported is no garbage: frozen, no collection of a worker's looks at it again.
    with ProcessPoolExecutor(workers, get_context("fork"), initializer=gc.freeze) as pool:
        # Early stages hold, and so run, the most micro-batches: they go first, which they do in the order of ranks.
        running = [pool.submit(rehearse_rank, job, layout, rank, device, kernels) for rank in ranks]
        done = [_told(one.result(), place, len(ranks), progress) for place, one in enumerate(as_completed(running))]
    return sorted(done, key=lambda one: one.rank)


def _told(one: Rehearsal, done: int, of: int, progress: Callable[[str], None]) -> Rehearsal:
    progress(f"{done + 1} of {of}: rank {one.rank} in {one.seconds:.1f} s")
    return one


def rehearse_rank(job: Job, layout: Layout, rank: int, device: str = "meta", kernels: str = "eager") -> Rehearsal:
    """One step of one rank, in this process. A device of `cpu` computes with real numbers: as a GPU would, but slowly."""
    start = time.perf_counter()
    short = shorten(layout, RankCoordinates.of(layout, rank).pp)
    # Its own schedule, cut: a layout of so few micro-batches may have another one, or none.
    schedule = cut(schedule_of(layout), short.microbatches)
    nowhere = without_memory(routed_rows(job, layout)) if device == "meta" else nullcontext()
    formats = replaced(build, "compute_format", _as_on_a_gpu) if device == "meta" else nullcontext()
    own = as_on_a_gpu() if device == "meta" and kernels == "fused" else nullcontext()
    with (
        single_rank_world(rank, layout.gpus),
        nowhere as fake,
        formats,
        own,
        replaced(build, "schedule_of", lambda _: schedule),
    ):
        found = _rehearsed(job, layout, rank, device, kernels, short, fake)
        gc.collect()
    return dataclasses.replace(found, seconds=time.perf_counter() - start)


def _as_on_a_gpu(job: Job, _: Mesh) -> torch.dtype:
    """A CPU that computes has fp32 around products in fp8; nothing is computed here."""
    return COMPUTE["bf16" if job.precision == "fp8" else job.precision]


def _rehearsed(
    job: Job, layout: Layout, rank: int, device: str, kernels: str, short: ShortSchedule, fake: QuickFakeTensorMode | None
) -> Rehearsal:
    smaller = layout.changed(gas=short.microbatches)
    here = f"cuda:{torch.cuda.current_device()}" if device == "cuda" else "cpu"
    mesh, techniques = unconnected_groups(Mesh.build(smaller, job.model.kv_heads, rank, here))
    engine = Engine(
        job, mesh, Training.model_validate({"steps": 1, "kernels": kernels}), cast(Batches, ConstantBatches(job.seq))
    )
    engine.optimizer.continued(1)  # its states exist from the first step on
    _gather_once(engine)
    if device != "meta":
        without_values(engine)
    kernels_s = None
    if device == "cuda":
        engine.step(0)  # kernels are compiled and chosen in the first
        kernels_s = kernel_times(lambda: engine.step(0))
    memory, watch = _accounted(engine, techniques, fake)
    # A step reads the tokens of all its micro-batches, inputs and targets, before it computes.
    unread = (layout.gas - short.microbatches) * layout.mbs * len(engine.here) * 2 * torch.int64.itemsize
    return Rehearsal(
        rank=rank,
        place=mesh.place,
        alike=layout.gpus // layout.pp,
        layers=len({weight.shard.name.split(".")[1] for weight in engine.weights if "blocks." in weight.shard.name}),
        memory=memory.model_copy(update={"activations": memory.activations + unread}),
        peak=(watch.peak if device != "cuda" else memory.total - (memory.runtime or 0)) + unread,
        moment=_words(watch.peak_moment, engine),
        flops=_flops(watch, short),
        collectives=_collectives(watch, short),
        microbatches=short.microbatches,
        kernels=kernels,
        kernels_s=kernels_s,
    )


def _accounted(
    engine: Engine, techniques: Mapping[str, str], fake: QuickFakeTensorMode | None
) -> tuple[MeasuredMemory, OperatorTracker]:
    """What a step holds and does: in one step, or on a GPU, whose allocator must not see who watches, in two."""
    gc.collect()
    watch = OperatorTracker(engine, techniques, fake)
    if engine.mesh.device.type == "cpu":
        watched(engine, watch)
        memory, _ = account(engine, lambda: engine.step(0), watch)
        come_and_go = {owner: max(getattr(memory, owner), watch.most[owner]) for owner in ("parameters", "gradients")}
        return memory.model_copy(update=come_and_go), watch
    memory, _ = account(engine, lambda: engine.step(0))
    watched(engine, watch)
    with watch:
        engine.step(0)
    return memory, watch


@torch.no_grad()
def _gather_once(engine: Engine) -> None:
    """FSDP2 makes its buffers in the first forward: it has one before the step, so that the account knows whose they are."""
    job, mesh = engine.job, engine.mesh
    for stage, chunk in engine.pipeline.chunks.items():
        if not isinstance(chunk.gradients, FSDPGrads):
            continue
        tokens = torch.zeros(mesh.layout.mbs, len(engine.positions), dtype=torch.int64, device=mesh.device)
        states = torch.zeros(boundary_shape(job, mesh.layout), dtype=build.compute_format(job, mesh), device=mesh.device)
        last = stage == engine.pipeline.last_stage
        chunk.gradients.module(tokens if stage == 0 else states, engine.positions, tokens if last else None)
        for part in chunk.gradients.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def _flops(watch: OperatorTracker, short: ShortSchedule) -> dict[str, int]:
    total: Counter[str] = Counter()
    for (place, _), found in watch.seen.flops.items():
        for name, count in found.items():
            total[name] += count * short.weight(place)
    return dict(total.most_common())


def _collectives(watch: OperatorTracker, short: ShortSchedule) -> tuple[Collective, ...]:
    calls: Counter[tuple[CollectiveCall, str]] = Counter()
    for (place, where), found in watch.seen.calls.items():
        for call, count in found.items():
            calls[call, where] += count * short.weight(place)
    together: dict[tuple[str, str, int, str], tuple[int, float]] = {}
    for (call, where), count in calls.items():
        key = call.technique, call.kind, call.group, where
        number, sent = together.get(key, (0, 0.0))
        together[key] = number + count, sent + count * call.sent
    return tuple(
        Collective(*key, number, round(sent))
        for key, (number, sent) in sorted(together.items(), key=lambda one: (one[0][0], -one[1][1]))
    )


def _words(moment: StepPosition, engine: Engine) -> str:
    """`backward of micro-batch 3, layer 17`."""
    actions = engine.pipeline.schedule.actions[engine.pipeline.rank]
    if moment.place is None or moment.place >= len(actions):
        return {"pipeline": "end of the last backward", "reading": "before the first forward"}.get(moment.phase, moment.phase)
    action = actions[moment.place]
    names = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
    chunk = f" of stage {action.stage}" if len(engine.pipeline.chunks) > 1 else ""
    return f"{names[action.kind.value]} of micro-batch {action.microbatch}{chunk}, {moment.layer}"
