"""The playbook's ladders as data: for each technique its steps, from the plain form to the best, and what each changes.

Ladders: one job run several times, each time with one thing more, so that what each bought can be seen.

Every rung is a run of its own, the same that `train` starts: its figures are the run's. Which rungs a ladder has stands in
ladders_rungs.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ultrascale.measure import bench_trial as trial
from ultrascale.measure.bench_trial import TrialFailure, TrialResult, tensors_gib
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.estimate import Estimate
from ultrascale.specs.layout import Layout
from ultrascale.specs.measurement import Measurement
from ultrascale.specs.model import Model
from ultrascale.train.request import Overrides, Request, from_model

LADDERS = ("data", "zero", "tensor", "context", "pipeline", "recompute", "precision", "kernels")
ACCUMULATED = 4  # micro-batches, where reducing after each or only after the last is compared
IN_FLIGHT = 4  # micro-batches per pipeline stage: the bubble of the plain schedules is still large


@dataclass(frozen=True)
class PlannedRung:
    """One rung: what is set, beyond the size of the micro-batch."""

    name: str
    what: str
    world: int = 1
    """processes that it needs"""
    layout: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    precision: str | None = None
    """None: what the machine trains in"""
    gpu_alone: bool = False


def planned(ladder: str, world: int) -> list[PlannedRung]:
    """The rungs with as many processes as there are, and at least two where one has nobody to talk to."""
    return _RUNGS[ladder](max(2, world))


def _data(world: int) -> list[PlannedRung]:
    each = {"reduce_every_microbatch": True}
    rungs: tuple[tuple[str, str, str, dict[str, bool]], ...] = (
        ("naive", "gradients meet after backward, one tensor at a time, in every micro-batch", "naive", each),
        ("hooks", "each tensor as soon as its gradient is made", "hooks", each),
        ("buckets", "several tensors together, as soon as all are made", "bucketed", each),
        ("last only", "buckets, in the last micro-batch alone", "bucketed", {}),
    )
    shape = {"dp": world, "gas": ACCUMULATED}
    return [PlannedRung(name, what, world, {**shape, "data_parallel": way}, train) for name, what, way, train in rungs]


def _zero(world: int) -> list[PlannedRung]:
    what = ("every rank holds everything", "optimizer states sharded", "gradients too", "parameters too, gathered when used")
    return [PlannedRung(f"ZeRO-{n}", words, world, {"dp": world, "zero": n}) for n, words in enumerate(what)]


def _tensor(world: int) -> list[PlannedRung]:
    return [
        PlannedRung(
            "TP", "matrices cut; norms and residuals whole on every rank", world, {"tp": world, "sequence_parallel": False}
        ),
        PlannedRung("TP+SP", "norms and residuals cut along the sequence", world, {"tp": world, "sequence_parallel": True}),
    ]


def _context(world: int) -> list[PlannedRung]:
    rungs = {
        "allgather": "every rank gathers all keys and values",
        "ring": "keys and values go round while attention computes",
        "zigzag": "the ring, with two slices each so that the causal mask leaves all ranks alike much",
    }
    return [PlannedRung(way, what, world, {"cp": world, "context_parallel": way}) for way, what in rungs.items()]


def _pipeline(world: int) -> list[PlannedRung]:
    rungs = (
        ("AFAB", "all forwards, then all backwards", "afab", 1),
        ("1F1B", "backwards as early as they can: fewer micro-batches are held", "1f1b", 1),
        ("interleaved", "two chunks of layers each: half the bubble", "interleaved", 2),
        ("zero bubble", "weight gradients apart, where the bubble was", "zero-bubble", 1),
        ("DualPipe", "two chunks folded to a V, weight gradients apart", "dualpipe-v", 2),
    )
    shape = {"pp": world, "gas": IN_FLIGHT * world}
    return [
        PlannedRung(name, what, world, {**shape, "schedule": schedule, "virtual_stages": chunks})
        for name, what, schedule, chunks in rungs
    ]


def _recompute(_: int) -> list[PlannedRung]:
    rungs = {
        "none": "every activation is kept",
        "selective": "norms, rotations and gates computed again in backward",
        "full": "only each layer's input is kept",
    }
    return [PlannedRung(policy, what, layout={"recompute": policy}) for policy, what in rungs.items()]


def _precision(_: int) -> list[PlannedRung]:
    rungs = {
        "fp32": "all in fp32",
        "bf16": "products in bf16, an fp32 master of the weights",
        "fp8": "products of the blocks in fp8, with a scale per tensor",
    }
    return [PlannedRung(precision, what, precision=precision) for precision, what in rungs.items()]


def _kernels(_: int) -> list[PlannedRung]:
    rungs = {
        "eager": "torch's operators one by one",
        "compile": "torch.compile of every block and of the head",
        "fused": "our own kernels, torch.compile for the rest",
    }
    return [PlannedRung(way, what, train={"kernels": way}, gpu_alone=way != "eager") for way, what in rungs.items()]


_RUNGS = {
    "data": _data,
    "zero": _zero,
    "tensor": _tensor,
    "context": _context,
    "pipeline": _pipeline,
    "recompute": _recompute,
    "precision": _precision,
    "kernels": _kernels,
}


WARM_UP = 2  # steps: compilation and first touches, then the one that is followed for its memory
LIMIT_S = 1800.0  # a rung that takes longer is stuck
EXCHANGES = ("tensor_s", "context_s", "expert_s", "zero_s", "data_s")


@dataclass(frozen=True)
class Figures:
    """Of one step, predicted or measured alike. None: unseen."""

    step_s: float
    tensors_gib: float
    """at the peak of the fullest rank"""
    exposed_s: float | None
    """waiting for other ranks' tensors and gradients"""
    bubble_s: float | None
    """waiting for other pipeline stages"""


@dataclass(frozen=True)
class Rung:
    name: str
    what: str
    layout: str = ""
    measured: Figures | None = None
    predicted: Figures | None = None
    tokens_per_s: float = 0.0
    mfu: float | None = None
    """None: the machine's peak is not known"""
    loss: float = 0.0
    """of the last step: rungs of one ladder must train alike"""
    first_step_s: float = 0.0
    """with what is made once: compiled kernels, buffers"""
    problem: str | None = None
    """why there are no figures"""


@dataclass(frozen=True)
class Ladder:
    name: str
    what: str
    rungs: tuple[Rung, ...]


@dataclass(frozen=True)
class LadderMachine:
    """The machine as a ladder meets it, and what is climbed."""

    model: Model
    seq: int
    mbs: int
    steps: int
    world: int
    gpus: int
    """0: this machine computes on its CPU"""
    machine: Callable[[int, str], Cluster | None]
    """so many processes of it, in that precision, for a prediction; None where its rates are not known"""


def chosen(only: str | None) -> list[str]:
    words = LADDERS if only is None else tuple(word.strip().lower() for word in only.split(",") if word.strip())
    for word in words:
        if word not in LADDERS:
            raise SpecError(f"--only is '{only!s:.60}': {nearest(word, LADDERS)}")
    if not words:
        raise SpecError(f"--only names no ladder: try {LADDERS[0]}")
    return [name for name in LADDERS if name in words]


def climb(name: str, here: LadderMachine, say: Callable[[str], None] = lambda text: None) -> Ladder:
    rungs = []
    wanted = planned(name, here.world)
    for number, one in enumerate(wanted, 1):
        say(f"{name}, rung {number} of {len(wanted)}: {one.name}")
        rungs.append(_rung(one, here))
    counted = f"{here.steps} steps after {WARM_UP}" if here.steps > 1 else f"1 step after {WARM_UP}"
    gas = wanted[0].layout.get("gas", 1)
    batch = f"{gas} × {here.mbs} × {here.seq:,} tokens a replica and step"
    return Ladder(name, f"{here.model.name}, {batch}, {counted}", tuple(rungs))


def requested(one: PlannedRung, here: LadderMachine) -> Request:
    """SpecError where this machine, model or engine cannot."""
    if one.world > 1 and here.world < one.world:
        there = f"{here.gpus} GPU" if here.gpus else f"--nproc {here.world}"
        raise SpecError(f"needs {one.world} {'GPUs' if here.gpus else 'processes'}, here is {there}")
    if one.gpu_alone and not here.gpus:
        raise SpecError("of a GPU alone: on a CPU the engine runs operator by operator")
    precision = one.precision or ("bf16" if here.gpus else "fp32")
    changes = Overrides(
        layout={"dp": 1, "mbs": here.mbs, "gas": 1, **one.layout},
        train={"steps": WARM_UP + here.steps, "data": "synthetic", "warmup_steps": 0, **one.train},
        job={"seq": here.seq},
        checkpoint={"save": False},
    )
    return from_model(here.model, changes, one.world, precision=precision)


def _rung(one: PlannedRung, here: LadderMachine) -> Rung:
    asked = Rung(one.name, one.what)
    try:
        request = requested(one, here)
    except SpecError as error:
        return replace(asked, problem=str(error).split(". Layouts of")[0])
    cluster = here.machine(one.world, request.job.precision)
    with tempfile.TemporaryDirectory(prefix="ultrascale-") as folder:
        ended = trial.run(request, Path(folder) / "run", cluster, LIMIT_S)
    asked = replace(asked, layout=str(request.layout))
    if isinstance(ended, TrialFailure):
        known = ended.kind if ended.kind == "out of memory" else f"{ended.kind}: {ended.reason}"
        return replace(asked, problem=known)
    return told(asked, ended, request, one)


def told(asked: Rung, ended: TrialResult, request: Request, one: PlannedRung) -> Rung:
    measured, again = ended.measured, request.layout.gas if one.train.get("reduce_every_microbatch") else 1
    waited = _waited(measured, request.layout)
    return replace(
        asked,
        measured=Figures(measured.step_time_s, tensors_gib(measured), waited, measured.time.bubble_s),
        predicted=None if ended.predicted is None else foretold(ended.predicted, again),
        tokens_per_s=measured.tokens_per_s,
        mfu=measured.mfu,
        loss=ended.loss,
        first_step_s=ended.first_step_s,
    )


def foretold(estimate: Estimate, reductions: int = 1) -> Figures:
    """`reductions` of gradients in a step: an estimate has one, behind the last backward; each other hides as well as it."""
    more = (reductions - 1) * estimate.time.data_s
    exposed = sum(getattr(estimate.time, name) for name in EXCHANGES) + more
    waiting = estimate.time.bubble_s + estimate.time.send_s
    return Figures(estimate.step_time_s + more, tensors_gib(estimate), exposed, waiting)


def _waited(measured: Measurement, layout: Layout) -> float | None:
    """None where the device waits unseen (GPUs), or torch exchanges gradients by itself (ZeRO)."""
    if measured.time.tensor_s is None or (layout.data_ranks > 1 and measured.time.data_s is None):
        return None
    return sum(getattr(measured.time, name) or 0.0 for name in EXCHANGES)


def climbed(names: list[str], here: LadderMachine, say: Callable[[str], None]) -> Iterator[Ladder]:
    """One after the other, so that what is found can be kept before the next begins."""
    for name in names:
        yield climb(name, here, say)
