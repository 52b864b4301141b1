"""Compare two sides of a step, term by term: a plan and a run, two runs, or two plans; with likely causes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ultrascale.cost import host
from ultrascale.cost.estimate import estimate
from ultrascale.cost.kernels import QUERY_BLOCK
from ultrascale.specs.errors import SpecError
from ultrascale.specs.estimate import MEASURED_OWNERS, Estimate
from ultrascale.specs.folders import MEASUREMENT, PLAN
from ultrascale.specs.measurement import Measurement
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import byte_size, seconds

# What a Measurement distinguishes, and the causes of an Estimate that it measures as one.
TIMES = {
    "computing": ("computing_s", ("matmul_s", "attention_s", "memory_bound_s", "recompute_s", "launch_s")),
    "tensor communication": ("tensor_s", ("tensor_s",)),
    "context communication": ("context_s", ("context_s",)),
    "expert communication": ("expert_s", ("expert_s",)),
    "gradient reduction": ("data_s", ("data_s",)),
    "ZeRO communication": ("zero_s", ("zero_s",)),
    "waiting for stages": ("bubble_s", ("bubble_s", "send_s")),
    "optimizer": ("optimizer_s", ("optimizer_s",)),
    "reading data": ("overhead_s", ()),
}
# A measurement cannot tell buffers from activations: they are compared together.
_COMBINATION_RULES = ("activations", "buffers")
OWNER_TERMS = {
    **{owner: (owner,) for owner in MEASURED_OWNERS if owner not in _COMBINATION_RULES},
    ", ".join(_COMBINATION_RULES): _COMBINATION_RULES,
}
HEAD, SHORT_ROW = 128, 2048  # head size of the attention tables; shorter sequences fill a GPU less
SLOW_LAUNCH_S = 2e-5  # of a kernel: above this, the step is host-bound

_CAUSES = {
    "tensor communication": "the link between its ranks is another than the plan's",
    "context communication": "the link between its ranks is another than the plan's",
    "expert communication": "experts got uneven shares of the tokens, or the link is another than the plan's",
    "gradient reduction": "data ranks wait for the slowest of them, or less of it hides behind backward",
    "ZeRO communication": "less of it hides behind a layer's work than planned",
    "waiting for stages": "stages differ in what they compute, and each wait is for the slowest",
    "reading data": "the data is read slower than a step computes",
    "parameters": "weights are kept in another format than planned",
    "master": "weights are kept in another format than planned",
    "gradients": "gradients are kept in another format, or come and go with their layers",
    "optimizer": "its states are kept in another format than planned",
    "activations, buffers": "backward keeps other tensors than the law counts",
}


@dataclass(frozen=True)
class ComparedTerm:
    """One quantity on both sides. None: that side does not know it."""

    name: str
    unit: str
    """s, B, % of a whole, or none"""
    first: float | None
    second: float | None
    part: bool = False
    """a part of the nearest term above that is not"""

    @property
    def difference(self) -> float | None:
        """Of the first side relative to the second."""
        return self.first / self.second - 1 if self.first is not None and self.second else None


@dataclass(frozen=True)
class ComparisonSide:
    name: str
    plan: Plan
    result: Estimate | Measurement
    """the plan's estimate, or the run's measurement"""

    @property
    def word(self) -> str:
        return "measured" if isinstance(self.result, Measurement) else "planned"


@dataclass(frozen=True)
class Comparison:
    first: ComparisonSide
    second: ComparisonSide
    terms: tuple[ComparedTerm, ...]
    differences: tuple[str, ...]
    """settings in which the two differ"""

    @property
    def sentences(self) -> tuple[str, ...]:
        """The largest part of the difference, in time and in memory, with its likely cause."""
        return tuple(_largest(self, whole, unit) for whole, unit in (("step time", "s"), ("tensors at the peak", "B")))

    def cause(self, term: str, gap: float) -> str | None:
        """The likely one; None: unknown. Two runs, or two plans, differ in `differences`. `gap`: first minus second."""
        sides = {side.word: side for side in (self.first, self.second)}
        if len(sides) < 2:
            return None
        planned, measured = sides["planned"].result, sides["measured"].result
        assert isinstance(planned, Estimate)
        assert isinstance(measured, Measurement)
        slower = (gap > 0) == (self.first.word == "measured")
        plan = sides["measured"].plan
        if term == "attention":
            return _attention(plan, slower)
        if term in ("computing", "step time"):
            return _computing(plan, planned, measured, slower)
        if term == "optimizer":
            return "its kernels wait for the host to launch them, one or more for each tensor" if slower else None
        return _CAUSES.get(term)


def load(path: Path) -> ComparisonSide:
    """A run's folder, or a plan's file."""
    if not path.exists():
        raise SpecError(f"{path} does not exist: give a plan file, such as plan.yaml, or a run's folder, such as runs/first")
    if not path.is_dir():
        plan = Plan.load(path)
        return ComparisonSide(str(path), plan, plan.estimate)
    return ComparisonSide(str(path), *load_run(path, "there is nothing to compare", "try another run, or a plan file"))


def load_run(path: Path, consequence: str, advice: str) -> tuple[Plan, Measurement]:
    """The plan and the measurement of a run's folder; SpecError with the consequence and the advice if one is missing."""
    for name, hint in ((PLAN, "`ultrascale train --out` writes it"), (MEASUREMENT, "a run has it once all its steps are done")):
        if not (path / name).is_file():
            raise SpecError(f"{path} has no {name}, so {consequence} ({hint}): {advice}")
    measured = Measurement.load(path / MEASUREMENT)
    return of_measured_batch(Plan.load(path / PLAN), measured), measured


def of_measured_batch(plan: Plan, measured: Measurement) -> Plan:
    """The plan, with an estimate for the batch that was measured."""
    if measured.batch_tokens is None:
        return plan
    job, layout = measured.of_batch(plan.job, plan.layout)
    return Plan(job=job, layout=layout, estimate=estimate(job, layout))


def compare(first: ComparisonSide, second: ComparisonSide) -> Comparison:
    models = [side.plan.job.model for side in (first, second)]
    if first.word != second.word and models[0] != models[1]:
        raise SpecError(
            f"{first.name} is of {models[0].name} and {second.name} of {models[1].name}: a plan is compared with a run of its "
            "own model; two runs, or two plans, may differ in it"
        )
    found = list(terms(first.result, second.result))
    one, other = (_attention_s(side) for side in (first, second))
    if one and other:
        place = next((number for number, term in enumerate(found) if term.name == "computing"), len(found) - 1) + 1
        found.insert(place, ComparedTerm("attention", "s", one, other, part=True))
    return Comparison(first, second, tuple(found), tuple(_differences(first.plan, second.plan)))


def _attention_s(side: ComparisonSide) -> float | None:
    """Of a step. A run on a GPU timed attention of one layer, forward and backward, when it selected a kernel."""
    if isinstance(side.result, Estimate):
        return side.result.time.attention_s
    layers = max(stage.layers for stage in side.result.memory)
    matches = (re.match(r"attention: \w+ ([\d.]+) ms", note) for note in side.result.notes)
    return next((layers * side.plan.layout.gas * float(match[1]) / 1e3 for match in matches if match), None)


def terms(first: Estimate | Measurement | None, second: Estimate | Measurement | None) -> Iterator[ComparedTerm]:
    """Every term that a side knows: rates, time by cause, memory of the fullest stage by owner."""

    def both(name: str, unit: str, values: tuple[float | None, float | None], part: bool = True) -> Iterator[ComparedTerm]:
        if any(values):
            yield ComparedTerm(name, unit, *values, part=part)

    sides = first, second
    rates = {
        "step time": ("step_time_s", "s"),
        "tokens/s/GPU": ("tokens_per_s_per_gpu", ""),
        "MFU, causal": ("mfu_causal", "%"),
    }
    if any(isinstance(side, Measurement) and side.mfu_causal is None for side in sides):
        del rates["MFU, causal"]  # the machine's peak is not known
    for name, (field, unit) in rates.items():
        yield from both(name, unit, (getattr(first, field, None), getattr(second, field, None)), part=False)
    for name in TIMES:
        yield from both(name, "s", (_time(first, name), _time(second, name)))
    stage = next((side.peak_stage for side in sides if isinstance(side, Measurement)), None)
    bytes_by_owner = [_bytes_by_owner(side, stage) for side in sides]
    totals = [sum(one.values()) if one else None for one in bytes_by_owner]
    many = any(side is not None and len(side.memory) > 1 for side in sides)
    where = f", stage {stage}" if many and stage is not None else ""
    yield from both(f"tensors at the peak{where}", "B", (totals[0], totals[1]), part=False)
    for owner in OWNER_TERMS:
        yield from both(owner, "B", (bytes_by_owner[0].get(owner), bytes_by_owner[1].get(owner)))


def _time(side: Estimate | Measurement | None, name: str) -> float | None:
    measured, causes = TIMES[name]
    if isinstance(side, Measurement):
        return getattr(side.time, measured)  # type: ignore[no-any-return]
    return sum(getattr(side.time, cause) for cause in causes) if side is not None and causes else None


def _bytes_by_owner(side: Estimate | Measurement | None, stage: int | None) -> dict[str, float]:
    """Tensors only, without CUDA context and allocator."""
    if side is None:
        return {}
    place = side.peak_stage if stage is None or stage >= len(side.memory) else stage
    memory = side.memory[place].memory
    return {name: sum(getattr(memory, owner) for owner in owners) for name, owners in OWNER_TERMS.items()}


def _differences(first: Plan, second: Plan) -> Iterator[str]:
    """`layout.tp 2 and 1` for each setting that differs."""
    for what, one, other in (("layout", first.layout, second.layout), ("job", first.job, second.job)):
        for field in type(one).model_fields:
            values: list[Any] = [getattr(side, field) for side in (one, other)]
            if values[0] != values[1]:
                words = [getattr(value, "label", None) or getattr(value, "name", None) or value for value in values]
                same = words[0] == words[1]
                yield f"{what}.{field} {'of other numbers' if same else f'{words[0]} and {words[1]}'}"


def _largest(compared: Comparison, whole: str, unit: str) -> str:
    found = compared.terms
    total = next((term for term in found if term.name.startswith(whole)), None)
    if total is None or total.first is None or total.second is None:
        return f"{whole}: only one side knows it"
    amount = seconds if unit == "s" else byte_size
    first, second = total.first, total.second
    sentence = f"{whole}: {amount(first)} against {amount(second)} ({first / second - 1:+.1%})"
    known = [
        (term, term.first - term.second)
        for term in found
        if term.part and term.unit == unit and term.first is not None and term.second is not None
    ]
    if not known:
        return sentence + _cause_suffix(compared, whole, first - second)
    # A part that differs the other way makes the total difference smaller.
    towards = [one for one in known if one[1] * (first - second) > 0]
    term, gap = max(towards or known, key=lambda one: abs(one[1]))
    if abs(gap) < 0.005 * second and abs(first - second) < 0.02 * second:
        return f"{sentence}; no part differs by more than 0.5 % of it"
    if not towards or abs(gap) < 0.3 * abs(first - second):  # the difference is not in what the run measures apart
        return sentence + _cause_suffix(compared, whole, first - second)
    share = "" if term.difference is None else f" ({term.difference:+.0%})"
    most = f"{sentence}; most of it is {term.name}, {amount(abs(gap))} {'more' if gap > 0 else 'less'}{share}"
    return most + _cause_suffix(compared, term.name, gap)


def _cause_suffix(compared: Comparison, term: str, gap: float) -> str:
    cause = compared.cause(term, gap)
    return f": {cause}" if cause else ""


def _attention(plan: Plan, slower: bool) -> str | None:
    job, layout = plan.job, plan.layout
    heads, seq = job.model.heads // layout.tp, job.seq
    if not slower:
        return "the kernel chosen here is faster than the table's"
    blocks = layout.mbs * heads * -(-seq // QUERY_BLOCK)
    processors = job.cluster.gpu.multiprocessors
    if processors and blocks < 4 * processors:
        return f"{layout.mbs} × {heads} heads of {seq} tokens are {blocks} blocks, few for {processors} multiprocessors"
    if job.model.head_dim != HEAD:
        return f"head size {job.model.head_dim}"
    return f"rows of {seq} tokens are short" if seq <= SHORT_ROW else "the kernel chosen here is slower than the table's"


def _computing(plan: Plan, planned: Estimate, measured: Measurement, slower: bool) -> str | None:
    job, layout = plan.job, plan.layout
    if job.cluster.efficiency.synchronous:
        return "the machine was busy otherwise, or its rates were measured while it was" if slower else None
    counts = host.constants()
    of_layer = counts.launch_queue.layer.both if job.framework.fused_blocks else 3 * counts.compiled_layer.kernels
    kernels = of_layer * job.framework.launch * job.model.layers / layout.pp * layout.gas
    each_s = (measured.step_time_s - planned.time.optimizer_s) / kernels
    if slower and measured.step_time_s > 1.3 * planned.step_time_s and each_s < 10 * SLOW_LAUNCH_S:
        return (
            f"the GPU waits for the host: {layout.mbs * job.seq:,} tokens are little work for some {kernels:,.0f} kernels, "
            f"and each took {1e6 * each_s:.0f} µs; a larger micro-batch would fill it"
        )
    return None if job.cluster.calibrated else "no run has told the plan this GPU's constants: `ultrascale calibrate` fits them"
