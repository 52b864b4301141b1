"""Bounded least squares on the logarithm of step times, in as few constants as the runs determine.

Gauss-Newton with finite differences; each constant has a prior at its old value. Which constants are fitted is decided first,
by sensitivities: those leave, one after the other, that the runs and the priors of the others would leave nearly as uncertain
as they were.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ultrascale.cost.estimate import estimate
from ultrascale.cost.hardware import UNMEASURED_LATENCY_S, UNMEASURED_LINK, ClusterRates
from ultrascale.measure.calibrate_runs import CalibrationRun
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.efficiency import Efficiency
from ultrascale.specs.job import Job


@dataclass(frozen=True)
class Constant:
    """One number to fit; several `fields` of Efficiency change together where step times cannot separate them."""

    fields: tuple[str, ...]
    prior: float
    """standard deviation of its logarithm around its old value"""
    run: str
    """which run would determine it"""
    on_host: float | None = None
    """the prior on a CPU, where operators are synchronous and transfers share the cores, if it differs"""

    @property
    def name(self) -> str:
        return self.fields[0] if len(self.fields) == 1 else self.fields[0].rsplit("_", 1)[0]


# Shares of a data sheet are known to some tenths before any run; times of a host or of a hop only to their order of magnitude.
# On a CPU rates were measured for a moment without load: gloo's threads share the cores, and other processes the caches.
CONSTANTS = (
    Constant(("matmul",), 0.2, "a run with more tokens in a micro-batch", 0.5),
    Constant(("matmul_fp8",), 0.2, "a run with job.precision=fp8"),
    Constant(("matmul_ramp",), 1.0, "two runs alike in tokens, one of a model half as wide"),
    Constant(("attention_forward", "attention_backward"), 0.2, "two runs of one model, one with longer sequences", 0.5),
    Constant(("memory_bandwidth",), 0.1, "a run with few tokens a step: the optimizer is then much of it", 0.3),
    Constant(("kernel_launch_s",), 2.0, "a run of a small model with layout.mbs=1", 0.7),
    Constant(("softmax_gscores_s",), 0.5, "two runs of a model with narrow heads, one with longer sequences"),
    Constant(("step_overhead_s",), 0.5, "a run whose steps take some ten milliseconds"),
    Constant(("link_bandwidth",), 0.3, "a run with layout.tp=2", 1.0),
    Constant(("link_latency_s",), 1.5, "a run with layout.tp=2 and few tokens in a micro-batch"),
    Constant(("network_bandwidth",), 0.3, "a run on two nodes with layout.zero=3"),
    Constant(("network_latency_s",), 1.5, "a run on two nodes with small transfers"),
    Constant(("overlap_slowdown",), 0.5, "a run with layout.dp=2 whose gradients hide"),
    Constant(("host_link",), 0.3, "a run with layout.offload=parameters"),
    Constant(("host_adam_gparams_s",), 1.0, "a run with layout.offload=optimizer"),
    Constant(("action_overhead_s",), 1.5, "a run with layout.pp=2 and many small micro-batches"),
)


def value(job: Job, field: str) -> float:
    """The value of a field that the laws use: given, or that of the GPU kind."""
    machine = ClusterRates(job)
    given = getattr(machine.efficiency, field)
    if given is not None:
        return float(given)
    if field in ("matmul", "matmul_fp8"):
        return machine.sustained["fp8" if field.endswith("fp8") else "bf16"]
    if field.startswith("attention_"):
        return float(getattr(machine.attention, field.removeprefix("attention_")))
    if machine.fabric is None:
        return UNMEASURED_LINK if field == "link_bandwidth" else UNMEASURED_LATENCY_S
    link = machine.intra("all_reduce")
    return link.bandwidth_gb_s / machine.cluster.link_bandwidth_gb_s if field == "link_bandwidth" else link.latency_s


def bounds(field: str) -> tuple[float, float]:
    """Limits of the field; at least 1e-7, since logarithms are fitted."""
    limits = {type(each).__name__: each for each in Efficiency.model_fields[field].metadata}
    low = float(getattr(limits.get("Ge"), "ge", 0.0))
    return max(low, 1e-7), float(getattr(limits.get("Le"), "le", math.inf))


@dataclass(frozen=True)
class InitialConstants:
    """The constants of one machine before the fit."""

    cluster: Cluster
    values: Mapping[str, float]

    @classmethod
    def of(cls, job: Job) -> InitialConstants:
        fields = [field for constant in CONSTANTS for field in constant.fields]
        return cls(job.cluster, {field: max(value(job, field), bounds(field)[0]) for field in fields})

    def prior(self, constant: Constant) -> float:
        on_host = constant.on_host if self.cluster.efficiency.synchronous else None
        return constant.prior if on_host is None else on_host

    def shifted(self, constant: Constant, by: float) -> dict[str, float]:
        """The constant's fields with their logarithms shifted, within bounds."""

        def within(field: str) -> float:
            low, high = bounds(field)
            return min(max(self.values[field] * math.exp(by), low), high)

        return {field: within(field) for field in constant.fields}

    def shift_bounds(self, constant: Constant) -> tuple[float, float]:
        """How far the logarithm may shift before a field reaches a bound."""
        low = max(math.log(bounds(field)[0] / self.values[field]) for field in constant.fields)
        return low, min(math.log(bounds(field)[1] / self.values[field]) for field in constant.fields)

    def changed(self, moves: Mapping[Constant, float]) -> Efficiency:
        given = {field: one for constant, by in moves.items() if by for field, one in self.shifted(constant, by).items()}
        return self.cluster.efficiency.model_copy(update={name: float(f"{one:.4g}") for name, one in given.items()})

    def job(self, job: Job, efficiency: Efficiency) -> Job:
        """A run's job on this machine: with its own nodes and this machine's rates."""
        ours = self.cluster
        same = {"gpu": ours.gpu, "link_bandwidth_gb_s": ours.link_bandwidth_gb_s, "network_gb_s": ours.network_gb_s}
        return job.model_copy(update={"cluster": job.cluster.model_copy(update={**same, "efficiency": efficiency})})


Floats = NDArray[np.float64]
LogShifts = dict[Constant, float]

NOISE = 0.01  # between two identical runs on an H200 that are not host-bound
NOISE_ON_HOST = 0.05  # on two cores of a shared machine, at least
HUBER_THRESHOLD = 3.0  # a residual beyond so many times the noise weighs less
DERIVATIVE_STEP = 0.02
MAX_LOG_SHIFT = 3.0  # shift of a logarithm: times may be orders of magnitude away
INITIAL_LOG_SHIFTS = (-MAX_LOG_SHIFT, -MAX_LOG_SHIFT / 2, MAX_LOG_SHIFT / 2, MAX_LOG_SHIFT)  # first guesses for such a time
MAX_UNCERTAINTY = 0.5  # of the prior: if the runs leave more uncertainty, they do not determine the constant
MIN_STEP_EFFECT = 0.02  # of a step: the least effect of a constant that is fitted
MAX_ROUNDS, CONVERGED_SHIFT = 12, 3e-3
REFIT_ROUNDS = 3  # rounds of a refit that starts from the fit of all runs


class StepTimeModel:
    """Predicted logarithms of step times, cached."""

    def __init__(self, base: InitialConstants, runs: Sequence[CalibrationRun]) -> None:
        self.base, self.runs = base, runs
        self._known: dict[tuple[int, Efficiency], float] = {}
        everyone = range(len(runs))
        still = self.logs({}, everyone)
        self.influential = tuple(
            constant for constant in CONSTANTS if np.abs(self.logs({constant: self._far(constant)}, everyone) - still).max() > 0
        )
        """constants on which some step time depends"""

    def _far(self, constant: Constant) -> float:
        low, high = self.base.shift_bounds(constant)
        return min(MAX_LOG_SHIFT, high) if high > -low else max(-MAX_LOG_SHIFT, low)

    def logs(self, moves: Mapping[Constant, float], of: Sequence[int]) -> Floats:
        efficiency = self.base.changed(moves)
        for index in of:
            if (index, efficiency) not in self._known:
                run = self.runs[index]
                step_s = estimate(self.base.job(run.job, efficiency), run.layout).step_time_s
                self._known[index, efficiency] = math.log(step_s)
        return np.asarray([self._known[index, efficiency] for index in of])


@dataclass(frozen=True)
class FitResult:
    moves: LogShifts
    """of the constants that were fitted"""
    known: dict[Constant, float]
    """uncertainty of each logarithm"""
    why: dict[Constant, str]
    """why the others were not"""


def fit(model: StepTimeModel, of: Sequence[int]) -> FitResult:
    """Fit to the runs `of`."""
    moves = _initial_guess(model, of)
    selected, _, _ = _determined(model, of, moves)
    moves = _solve(model, of, {constant: moves.get(constant, 0.0) for constant in selected})
    # Sensitivities at the solution differ from those at the start.
    again, known, why = _determined(model, of, moves)
    if set(again) != set(selected):
        moves = _solve(model, of, {constant: moves.get(constant, 0.0) for constant in again})
    return FitResult({constant: moves[constant] for constant in again}, known, why)


def refit(model: StepTimeModel, of: Sequence[int], found: FitResult) -> tuple[LogShifts, list[Constant]]:
    """The same constants from fewer runs, and those that these runs no longer determine, which keep their old values."""
    determined, _, _ = _determined(model, of, found.moves, most=len(of))
    lost = [constant for constant in found.moves if constant not in determined]
    return _solve(model, of, {constant: by for constant, by in found.moves.items() if constant not in lost}, REFIT_ROUNDS), lost


def _measured(model: StepTimeModel, of: Sequence[int]) -> Floats:
    return np.asarray([math.log(model.runs[index].step_s) for index in of])


def _weights(model: StepTimeModel, of: Sequence[int], residual: Floats) -> Floats:
    least = NOISE_ON_HOST if model.base.cluster.efficiency.synchronous else NOISE
    noise = np.asarray([math.hypot(least, model.runs[index].spread) for index in of])
    return np.asarray(1 / noise**2 / np.maximum(1.0, np.abs(residual) / (HUBER_THRESHOLD * noise)))


def _cost(model: StepTimeModel, of: Sequence[int], moves: LogShifts) -> float:
    """Robust: linear where a run is far off."""
    residual = _measured(model, of) - model.logs(moves, of)
    pulled = sum((by / model.base.prior(constant)) ** 2 for constant, by in moves.items())
    return float(_weights(model, of, residual) @ residual**2) + pulled


def _initial_guess(model: StepTimeModel, of: Sequence[int]) -> LogShifts:
    """First guesses of times that may be orders of magnitude away, where the derivative is zero: launches that are hidden.

    The constant that explains most goes first, so that an operator's overhead does not stand for a latency of communication.
    """
    moves: LogShifts = {}
    wide = [constant for constant in model.influential if model.base.prior(constant) >= 1]
    cost = _cost(model, of, moves)
    places = [
        (constant, by)
        for constant in wide
        for by in (0.0, *INITIAL_LOG_SHIFTS)
        if model.base.shift_bounds(constant)[0] <= by <= model.base.shift_bounds(constant)[1]
    ]
    while places:
        tried = [{**moves, constant: by} for constant, by in places]
        costs = [_cost(model, of, some) for some in tried]
        if min(costs) >= cost:
            break
        moves, cost = tried[int(np.argmin(costs))], min(costs)
    return {constant: by for constant, by in moves.items() if by}


def _sensitivities(model: StepTimeModel, of: Sequence[int], moves: LogShifts, constants: Sequence[Constant]) -> Floats:
    """d log(step) / d log(constant), a column each."""
    here = model.logs(moves, of)
    columns = []
    for constant in constants:
        by, high = moves.get(constant, 0.0), model.base.shift_bounds(constant)[1]
        step = DERIVATIVE_STEP if by + DERIVATIVE_STEP <= high else -DERIVATIVE_STEP
        columns.append((model.logs({**moves, constant: by + step}, of) - here) / step)
    return np.stack(columns, axis=1) if columns else np.zeros((len(of), 0))


def _determined(
    model: StepTimeModel, of: Sequence[int], moves: LogShifts, most: int | None = None
) -> tuple[list[Constant], dict[Constant, float], dict[Constant, str]]:
    """The constants that the runs determine, the uncertainty of each, and why the others are not determined.

    `most`: how many there may be; one fewer than there are runs unless given.
    """
    most = len(of) - 1 if most is None else most
    constants = model.influential
    every = _sensitivities(model, of, moves, constants)
    info = (every.T * _weights(model, of, np.zeros(len(of)))) @ every
    share = np.abs(every).max(axis=0) if constants else []
    why = {constant: "no step time follows it in these runs" for constant in CONSTANTS if constant not in constants}
    for constant, moved in zip(constants, share, strict=True):
        if moved < MIN_STEP_EFFECT:
            why[constant] = f"at most {moved:.1%} of a step follows it in these runs"
    inside = [k for k, constant in enumerate(constants) if constant not in why]
    prior = [model.base.prior(constant) for constant in constants]
    while inside:
        left = _deviations(info, inside, prior) / [prior[k] for k in inside]
        worst = int(np.argmax(left))
        if left[worst] <= MAX_UNCERTAINTY and len(inside) <= most:
            break
        k = inside.pop(worst)
        blurred = _confounded_with(info, inside, k, prior)
        reason = f"cannot tell it from {constants[blurred].name}" if blurred is not None else "tell it too loosely"
        why[constants[k]] = f"these runs {reason}"
    known = {constants[k]: float(sd) for k, sd in zip(inside, _deviations(info, inside, prior), strict=True)}
    return [constants[k] for k in inside], known, why


def _deviations(info: Floats, inside: Sequence[int], prior: Sequence[float]) -> Floats:
    """Standard deviation of each logarithm, from runs and priors together."""
    if not inside:
        return np.zeros(0)
    priors = np.diag([prior[k] ** -2 for k in inside])
    return np.asarray(np.sqrt(np.diag(np.linalg.inv(info[np.ix_(inside, inside)] + priors))))


def _confounded_with(info: Floats, inside: Sequence[int], k: int, prior: Sequence[float]) -> int | None:
    """The other constant that changes the same runs, where this one would be determined without it."""
    if not inside or _deviations(info, [k], prior)[0] > MAX_UNCERTAINTY * prior[k]:
        return None
    alike = [abs(info[k, other]) / math.sqrt(info[k, k] * info[other, other]) for other in inside]
    return inside[int(np.argmax(alike))]


def _solve(model: StepTimeModel, of: Sequence[int], moves: LogShifts, rounds: int = MAX_ROUNDS) -> LogShifts:
    constants = list(moves)
    if not constants:
        return {}
    prior = np.asarray([model.base.prior(constant) for constant in constants])
    room = np.asarray([model.base.shift_bounds(constant) for constant in constants])
    best, cost = dict(moves), _cost(model, of, moves)
    for _ in range(rounds):
        theta = np.asarray([best[constant] for constant in constants])
        residual = _measured(model, of) - model.logs(best, of)
        slope = _sensitivities(model, of, best, constants)
        weight = _weights(model, of, residual)
        left = (slope.T * weight) @ slope + np.diag(1 / prior**2)
        right = (slope.T * weight) @ residual - theta / prior**2
        step = np.clip(np.linalg.solve(left, right), -0.7, 0.7)
        for shorter in (1.0, 0.4, 0.1):
            moved = np.clip(theta + shorter * step, room[:, 0], room[:, 1])
            tried = dict(zip(constants, map(float, moved), strict=True))
            if (its := _cost(model, of, tried)) < cost:
                break
        else:
            break
        shift, best, cost = float(np.max(np.abs(moved - theta))), tried, its
        if shift < CONVERGED_SHIFT:
            break
    return best
