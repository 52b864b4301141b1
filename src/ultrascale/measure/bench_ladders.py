"""`bench ladders`: run one job several times, each time with one more technique, to see what each one gains.

Every rung of a ladder is a run of its own, the same that `train` starts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ultrascale.measure import bench_trial
from ultrascale.measure.bench_trial import TrialFailure, tensors_gib
from ultrascale.schedules import REGISTRY
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError
from ultrascale.specs.estimate import Estimate
from ultrascale.specs.layout import Layout
from ultrascale.specs.measurement import Measurement
from ultrascale.specs.model import Model
from ultrascale.train.request import Overrides, Request, from_model

LADDERS = ("data", "zero", "tensor", "context", "pipeline", "recompute", "precision", "kernels")
ACCUMULATED = 4  # micro-batches, where reducing after each or only after the last is compared
IN_FLIGHT = 4  # micro-batches per pipeline stage: few enough for a large bubble
WARM_UP = 2  # steps: compilation, then the one whose memory is measured
LIMIT_S = 1800.0  # a rung that takes longer hangs
EXPOSED = ("tensor_s", "context_s", "expert_s", "zero_s", "data_s")


@dataclass(frozen=True)
class PlannedRung:
    """The settings of one rung, besides the size of the micro-batch."""

    name: str
    what: str
    world: int = 1
    """processes that it needs"""
    layout: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    precision: str | None = None
    """None: what the machine trains in"""
    needs_gpu: bool = False


@dataclass(frozen=True)
class Figures:
    """One step, predicted or measured. None: not known."""

    step_s: float
    tensors_gib: float
    """at the peak of the fullest rank"""
    exposed_s: float | None
    """exposed communication of tensors and gradients"""
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
    """with compilation and first allocations"""
    problem: str | None = None
    """why there are no figures"""


@dataclass(frozen=True)
class Ladder:
    name: str
    what: str
    rungs: tuple[Rung, ...]


@dataclass(frozen=True)
class LadderMachine:
    """What is trained, and where."""

    model: Model
    seq: int
    mbs: int
    steps: int
    world: int
    gpus: int
    """0: this machine computes on its CPU"""
    machine: Callable[[int, str], Cluster | None]
    """a cluster of so many processes, in that precision, for predictions; None where its rates are not known"""


_DATA = {
    "naive": ("gradients meet after backward, one tensor at a time, in every micro-batch", "naive"),
    "hooks": ("each tensor as soon as its gradient is made", "hooks"),
    "buckets": ("several tensors together, as soon as all are made", "bucketed"),
    "last only": ("buckets, in the last micro-batch alone", "bucketed"),
}
_ZERO = ("every rank holds everything", "optimizer states sharded", "gradients too", "parameters too, gathered when used")
_TENSOR = {
    "TP": "matrices cut; norms and residuals whole on every rank",
    "TP+SP": "norms and residuals cut along the sequence",
}
_CONTEXT = {
    "allgather": "every rank gathers all keys and values",
    "ring": "keys and values go round while attention computes",
    "zigzag": "the ring, with two slices each so that the causal mask leaves all ranks alike much",
}
_RECOMPUTE = {
    "none": "every activation is kept",
    "selective": "norms, rotations and gates computed again in backward",
    "full": "only each layer's input is kept",
}
_PRECISION = {
    "fp32": "all in fp32",
    "bf16": "matmuls in bf16, an fp32 master of the weights",
    "fp8": "matmuls of the blocks in fp8, with a scale per tensor",
}
_KERNELS = {
    "eager": "torch's operators one by one",
    "compile": "torch.compile of every block and of the head",
    "fused": "our own kernels, torch.compile for the rest",
}


def planned(ladder: str, world: int) -> list[PlannedRung]:
    """The rungs of a ladder, from the plain form to the best; at least two processes where ranks communicate."""
    world = max(2, world)
    if ladder == "data":
        shape = {"dp": world, "gas": ACCUMULATED}
        each = {name: {} if name == "last only" else {"reduce_every_microbatch": True} for name in _DATA}
        return [
            PlannedRung(name, what, world, {**shape, "data_parallel": mode}, each[name]) for name, (what, mode) in _DATA.items()
        ]
    if ladder == "zero":
        return [PlannedRung(f"ZeRO-{stage}", what, world, {"dp": world, "zero": stage}) for stage, what in enumerate(_ZERO)]
    if ladder == "tensor":
        return [PlannedRung(name, _TENSOR[name], world, {"tp": world, "sequence_parallel": "SP" in name}) for name in _TENSOR]
    if ladder == "context":
        return [PlannedRung(mode, what, world, {"cp": world, "context_parallel": mode}) for mode, what in _CONTEXT.items()]
    if ladder == "pipeline":
        shape = {"pp": world, "gas": IN_FLIGHT * world}
        schedules = [(spec, *spec.ladder) for spec in REGISTRY.values() if spec.ladder is not None]
        return [
            PlannedRung(name, what, world, {**shape, "schedule": spec.name, "virtual_stages": spec.least_stages})
            for spec, name, what in schedules
        ]
    if ladder == "recompute":
        return [PlannedRung(policy, what, layout={"recompute": policy}) for policy, what in _RECOMPUTE.items()]
    if ladder == "precision":
        return [PlannedRung(precision, what, precision=precision) for precision, what in _PRECISION.items()]
    return [PlannedRung(name, what, train={"kernels": name}, needs_gpu=name != "eager") for name, what in _KERNELS.items()]


def climb(name: str, here: LadderMachine, say: Callable[[str], None] = lambda text: None) -> Ladder:
    rungs = []
    wanted = planned(name, here.world)
    for number, one in enumerate(wanted, 1):
        say(f"{name}, rung {number} of {len(wanted)}: {one.name}")
        rungs.append(_run(one, here))
    timed = f"{here.steps} steps after {WARM_UP}" if here.steps > 1 else f"1 step after {WARM_UP}"
    gas = wanted[0].layout.get("gas", 1)
    batch = f"{gas} × {here.mbs} × {here.seq:,} tokens a replica and step"
    return Ladder(name, f"{here.model.name}, {batch}, {timed}", tuple(rungs))


def requested(one: PlannedRung, here: LadderMachine) -> Request:
    """SpecError where this machine, model or engine cannot run it."""
    if one.world > 1 and here.world < one.world:
        there = f"{here.gpus} GPU" if here.gpus else f"--nproc {here.world}"
        raise SpecError(f"needs {one.world} {'GPUs' if here.gpus else 'processes'}, here is {there}")
    if one.needs_gpu and not here.gpus:
        raise SpecError("of a GPU alone: on a CPU the engine runs operator by operator")
    changes = Overrides(
        layout={"dp": 1, "mbs": here.mbs, "gas": 1, **one.layout},
        train={"steps": WARM_UP + here.steps, "data": "synthetic", "warmup_steps": 0, **one.train},
        job={"seq": here.seq},
        checkpoint={"save": False},
    )
    return from_model(here.model, changes, one.world, precision=one.precision or ("bf16" if here.gpus else "fp32"))


def _run(one: PlannedRung, here: LadderMachine) -> Rung:
    rung = Rung(one.name, one.what)
    try:
        request = requested(one, here)
    except SpecError as error:
        return replace(rung, problem=str(error).split(". Layouts of")[0])
    cluster = here.machine(one.world, request.job.precision)
    with tempfile.TemporaryDirectory(prefix="ultrascale-") as folder:
        ended = bench_trial.run(request, Path(folder) / "run", cluster, LIMIT_S)
    rung = replace(rung, layout=str(request.layout))
    if isinstance(ended, TrialFailure):
        return replace(rung, problem=ended.kind if ended.kind == "out of memory" else f"{ended.kind}: {ended.reason}")
    measured, reductions = ended.measured, request.layout.gas if one.train.get("reduce_every_microbatch") else 1
    exposed_s = _exposed_s(measured, request.layout)
    return replace(
        rung,
        measured=Figures(measured.step_time_s, tensors_gib(measured), exposed_s, measured.time.bubble_s),
        predicted=None if ended.predicted is None else predicted_figures(ended.predicted, reductions),
        tokens_per_s=measured.tokens_per_s,
        mfu=measured.mfu_causal,
        loss=ended.loss,
        first_step_s=ended.first_step_s,
    )


def predicted_figures(estimate: Estimate, reductions: int = 1) -> Figures:
    """`reductions`: of gradients in a step. An estimate has one, after the last backward; the others are exposed as much."""
    more = (reductions - 1) * estimate.time.data_s
    exposed = sum(getattr(estimate.time, name) for name in EXPOSED) + more
    waiting = estimate.time.bubble_s + estimate.time.send_s
    return Figures(estimate.step_time_s + more, tensors_gib(estimate), exposed, waiting)


def _exposed_s(measured: Measurement, layout: Layout) -> float | None:
    """None where the host does not see the device wait (GPUs), or torch reduces gradients by itself (ZeRO)."""
    if measured.time.tensor_s is None or (layout.data_ranks > 1 and measured.time.data_s is None):
        return None
    return sum(getattr(measured.time, name) or 0.0 for name in EXPOSED)
