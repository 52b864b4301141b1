"""Run one rank of a plan alone: one step of the real engine, with what it holds, computes and sends.

Other ranks do not exist and, unless on a GPU, tensors have no memory (rehearse_world.py). Only as many micro-batches run as
are needed: a schedule's action list is a beginning, a repeated part and an end, so that the shortest list with the same peak
and fewer repetitions stands for the whole step.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch.distributed.fsdp import FSDPModule

from ultrascale.kernels.cuda_graphs import EAGER_CALLS
from ultrascale.measure.peer_values import values_of_peers
from ultrascale.measure.rehearse import Rehearsal
from ultrascale.measure.rehearse_tracker import OperatorTracker, StepPosition, attach
from ultrascale.measure.rehearse_world import (
    ConstantBatches,
    QuickFakeTensorMode,
    RandomBatches,
    as_on_a_gpu,
    kernel_times,
    replaced,
    routed_rows,
    single_rank_world,
    step_time,
    unconnected_groups,
    without_memory,
    without_values,
)
from ultrascale.model.multi_token import tokens_ahead
from ultrascale.parallel.mesh import Mesh, RankCoordinates
from ultrascale.parallel.zero import FSDPGrads
from ultrascale.schedules import Action, ActionKind, Schedule
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.measurement import MeasuredMemory
from ultrascale.specs.training import Training
from ultrascale.train import build
from ultrascale.train.build import COMPUTE, boundary_shape, build_engine, schedule_of
from ultrascale.train.data import Batches
from ultrascale.train.engine import Engine
from ultrascale.train.memory import account


def rehearse_rank(job: Job, layout: Layout, rank: int, device: str = "meta", kernels: str = "eager") -> Rehearsal:
    """One step of one rank, in this process. The device `cpu` computes real values: like a GPU, but slowly."""
    start = time.perf_counter()
    short = shorten(layout, RankCoordinates.of(layout, rank).pp)
    # The first micro-batches of its own schedule: a layout with so few could have another order, or be illegal.
    schedule = cut(schedule_of(layout), short.microbatches)
    values = without_memory(routed_rows(job, layout)) if device == "meta" else values_of_peers()
    formats = replaced(build, "compute_format", _as_on_a_gpu) if device == "meta" else nullcontext()
    own = as_on_a_gpu() if device == "meta" and kernels == "fused" else nullcontext()
    with (
        single_rank_world(rank, layout.gpus),
        values as fake,
        formats,
        own,
        replaced(build, "schedule_of", lambda _: schedule),
    ):
        found = _rehearsed(job, layout, rank, device, kernels, short, fake)
        gc.collect()
    return dataclasses.replace(found, seconds=time.perf_counter() - start)


def _as_on_a_gpu(job: Job, _: Mesh) -> torch.dtype:
    """A real CPU computes in fp32 around fp8 GEMMs; nothing is computed here."""
    return COMPUTE["bf16" if job.precision == "fp8" else job.precision]


def _rehearsed(
    job: Job, layout: Layout, rank: int, device: str, kernels: str, short: ShortSchedule, fake: QuickFakeTensorMode | None
) -> Rehearsal:
    smaller = layout.changed(gas=short.microbatches)
    here = f"cuda:{torch.cuda.current_device()}" if device == "cuda" else "cpu"
    mesh, techniques = unconnected_groups(Mesh.build(smaller, job.model.kv_heads, rank, here))
    engine = build_engine(
        job,
        mesh,
        Training.model_validate({"steps": 1000 if device == "cuda" else 1, "kernels": kernels}),
        cast(Batches, ConstantBatches(job.seq) if device == "meta" else RandomBatches(job.seq, job.model.vocab)),
    )
    engine.optimizer.continued(1)  # so that its states exist
    _warm_up_gather(engine)
    if device != "meta":
        without_values(engine)
    tracker = OperatorTracker(engine, techniques, fake)
    kernels_s = step_s = None
    if device == "cuda":
        memory, kernels_s, step_s = _measured_on_gpu(engine, tracker)
    else:
        memory = _accounted(engine, tracker)
    # A step reads inputs and targets of all its micro-batches before it computes.
    unread = (
        (layout.gas - short.microbatches)
        * layout.mbs
        * len(engine.here[job.seq])
        * (2 + 2 * job.model.mtp_depth)
        * torch.int64.itemsize
    )
    return Rehearsal(
        rank=rank,
        place=mesh.place,
        alike=layout.gpus // layout.pp,
        layers=len({weight.shard.name.split(".")[1] for weight in engine.weights if "blocks." in weight.shard.name}),
        memory=memory.model_copy(update={"activations": memory.activations + unread}),
        peak=(tracker.peak if device != "cuda" else memory.total - (memory.runtime or 0)) + unread,
        moment=_words(tracker.peak_position, engine),
        flops=_flops(tracker, short),
        collectives=tracker.collectives(short.weight),
        microbatches=short.microbatches,
        kernels=kernels,
        kernels_s=kernels_s,
        step_s=step_s,
    )


def _accounted(engine: Engine, tracker: OperatorTracker) -> MeasuredMemory:
    """Memory of a step, whose operators are tracked."""
    gc.collect()
    attach(engine, tracker)
    memory, _ = account(engine, lambda: engine.step(0), tracker)
    come_and_go = {owner: max(getattr(memory, owner), tracker.most[owner]) for owner in ("parameters", "gradients")}
    return memory.model_copy(update=come_and_go)


def _measured_on_gpu(engine: Engine, tracker: OperatorTracker) -> tuple[MeasuredMemory, dict[str, float], float]:
    """Memory, seconds by kernel and seconds of a step, each of steps of its own: what measures one would change the others."""
    numbers = itertools.count()  # the next step's batch is read during this one

    def step() -> None:
        engine.step(next(numbers))

    step()  # compiles and selects kernels
    gc.collect()
    memory, _ = account(engine, step)
    kernels_s = kernel_times(step)
    for _ in range(EAGER_CALLS):  # in the last of which a CUDA graph may be captured
        step()
    step_s = step_time(step)
    attach(engine, tracker)
    with nullcontext() if engine.cuda_graphs is None else engine.cuda_graphs.eager(), tracker:
        step()
    return memory, kernels_s, step_s


@torch.no_grad()
def _warm_up_gather(engine: Engine) -> None:
    """FSDP2 allocates buffers in the first forward; run one before the step, so that their owner is known."""
    job, mesh = engine.job, engine.mesh
    for stage, chunk in engine.pipeline.chunks.items():
        if not isinstance(chunk.gradients, FSDPGrads):
            continue
        tokens = torch.zeros(mesh.layout.mbs, len(engine.positions[engine.job.seq]), dtype=torch.int64, device=mesh.device)
        states = torch.zeros(boundary_shape(job, mesh.layout), dtype=build.compute_format(job, mesh), device=mesh.device)
        last = stage == engine.pipeline.last_stage
        depth = job.model.mtp_depth
        wanted = {"targets": tokens} | ({"ahead": tokens_ahead(tokens, tokens, depth)} if depth else {})
        chunk.gradients.module(tokens if stage == 0 else states, engine.positions[engine.job.seq], **(wanted if last else {}))
        for part in chunk.gradients.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def _flops(tracker: OperatorTracker, short: ShortSchedule) -> dict[str, int]:
    total: Counter[str] = Counter()
    for (place, name), count in tracker.flops.items():
        total[name] += count * short.weight(place)
    return dict(total.most_common())


def _words(at: StepPosition, engine: Engine) -> str:
    """`backward of micro-batch 3, layer 17`."""
    actions = engine.pipeline.schedule.actions[engine.pipeline.rank]
    if at.place is None or at.place >= len(actions):
        return {"pipeline": "end of the last backward", "reading": "before the first forward"}.get(at.phase, at.phase)
    action = actions[at.place]
    names = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
    chunk = f" of stage {action.stage}" if len(engine.pipeline.chunks) > 1 else ""
    return f"{names[action.kind.value]} of micro-batch {action.microbatch}{chunk}, {at.layer}"


Step = tuple[ActionKind, int]


@dataclass(frozen=True)
class ShortSchedule:
    """Fewer micro-batches, and the part of their action list that the whole list repeats."""

    microbatches: int
    begin: int = 0
    end: int = 0
    times: int = 1
    """how often the whole list has that part"""

    def weight(self, place: int | None) -> int:
        """How often the whole step runs the action at this index; None: outside of the list, once."""
        return self.times if place is not None and self.begin <= place < self.end else 1


def shorten(layout: Layout, rank: int) -> ShortSchedule:
    """Of one pipeline rank."""
    whole = schedule_of(layout)
    full = _steps(whole.actions[rank])
    # HSDP keeps its reduced gradients from a chunk's second backward on: the maximum after that must be the same, too.
    replicas = layout.zero > 0 and layout.shards < layout.dp * layout.cp
    starts = (0, 2 * layout.virtual_stages) if replicas else (0,)
    for count in range(1, layout.gas):
        short = _steps(cut(whole, count).actions[rank])
        if (
            all(_maxima(short, ended) == _maxima(full, ended) for ended in starts)
            and (found := _repeated_part(short, full)) is not None
        ):
            return ShortSchedule(count, *found)
    return ShortSchedule(layout.gas)


def cut(schedule: Schedule, microbatches: int) -> Schedule:
    """The same schedule with its first micro-batches only."""
    kept = tuple(tuple(action for action in actions if action.microbatch < microbatches) for actions in schedule.actions)
    return replace(schedule, microbatches=microbatches, actions=kept)


def _steps(actions: Sequence[Action]) -> list[Step]:
    return [(action.kind, action.stage) for action in actions]


def _maxima(steps: list[Step], ended: int) -> tuple[int, int]:
    """Maximum numbers of chunks in flight, and of chunks with deferred weight gradients, after `ended` backwards."""
    in_flight, deferred, over = [0], [0], [0]
    for kind, _ in steps:
        in_flight.append(in_flight[-1] + {ActionKind.F: 1, ActionKind.I: 0}.get(kind, -1))
        deferred.append(deferred[-1] + {ActionKind.I: 1, ActionKind.W: -1}.get(kind, 0))
        over.append(over[-1] + (kind in (ActionKind.B, ActionKind.W)))
    late = [place for place, count in enumerate(over) if count >= ended]
    return max((in_flight[place] for place in late), default=0), max((deferred[place] for place in late), default=0)


def _repeated_part(short: list[Step], full: list[Step]) -> tuple[int, int, int] | None:
    """The part of `short` whose repetition gives `full`: (begin, end, times).

    Not the first round, in which ZeRO gathers and gradients are written rather than added, nor the last, in which they reduce.
    """
    more = len(full) - len(short)
    for length in range(2, len(short) + 1):
        if more % length:
            continue
        for begin in range(len(short) - length, -1, -1):
            end = begin + length
            block = short[begin:end]
            known = set(block) <= set(short[:begin]) and {step for step in block if step[0] is not ActionKind.F} <= set(
                short[end:]
            )
            if known and full[begin : end + more] == block * (1 + more // length) and _around(short, full, end, more):
                return begin, end, 1 + more // length
    return None


def _around(short: list[Step], full: list[Step], end: int, more: int) -> bool:
    return short[:end] == full[:end] and short[end:] == full[end + more :]
