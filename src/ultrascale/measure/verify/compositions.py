"""The layouts that `verify` tries for a number of processes: every way to cut, every variant on every way. No torch.

What may interact is crossed in full: axes (experts' too), ZeRO stage, schedule, way of context parallelism. The rest
(sequence parallelism, recomputation, ways of data parallelism, HSDP, micro-batch) takes turns, so that each value meets many
of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

from ultrascale.cost.legality import divisors
from ultrascale.schedules import REGISTRY
from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.training import Training
from ultrascale.train.supported import factors, layout_problem

AXES = ("dp", "tp", "pp", "cp", "ep")
TECHNIQUES = (*AXES, "zero", "recompute")
_CONTEXT = ("allgather", "ring", "zigzag", "ulysses")
_RECOMPUTE = ("none", "selective", "full")
_DATA = ("bucketed", "hooks", "naive", "ddp")


def compositions(job: Job, world: int, only: Sequence[str] = ()) -> list[Layout]:
    """Every layout of `world` processes that the job can take; `only`: those that use each of these techniques."""
    for word in only:
        if word not in TECHNIQUES:
            raise SpecError(f"--only names '{word:.40}': {nearest(word, TECHNIQUES)}")
    found = dict.fromkeys(layout for axes in factors(world) for layout in _of_axes(job, axes))
    return [layout for layout in found if all(_uses(layout, word) for word in only)]


def _of_axes(job: Job, axes: tuple[int, int, int, int]) -> Iterable[Layout]:
    dp, tp, pp, cp = axes
    schedules = tuple(REGISTRY) if pp > 1 else ("1f1b",)
    contexts = _CONTEXT if cp > 1 else ("zigzag",)
    stages = range(4) if dp * cp > 1 else range(1)
    alone = sum(size > 1 for size in axes) == 1  # one axis: the rest is crossed in full as well
    for turn, (ep, zero, schedule, context) in enumerate(product(_expert_ranks(job, dp * cp), stages, schedules, contexts)):
        turn += 3 * dp + 5 * tp + 7 * pp + 11 * cp  # another beginning for every way to cut
        ways = _DATA if zero == 0 and dp * cp > 1 else ("bucketed",)
        rests = product(_RECOMPUTE, (True, False) if tp > 1 else (True,), ways)
        for recompute, sequence, way in (
            rests if alone else [(_turn(_RECOMPUTE, turn), bool(turn % 2) or tp == 1, _turn(ways, turn))]
        ):
            fields: dict[str, Any] = {
                "dp": dp,
                "tp": tp,
                "pp": pp,
                "cp": cp,
                "ep": ep,
                "zero": zero,
                "schedule": schedule,
                "virtual_stages": REGISTRY[schedule].least_stages,
                "context_parallel": context,
                "recompute": recompute,
                "sequence_parallel": sequence,
                "data_parallel": way,
                "zero_shards": dp * cp // 2 if zero and dp * cp >= 4 and dp * cp // 2 % ep == 0 and turn % 4 == 1 else None,
                "keep_gathered": zero == 3 and turn % 5 == 0,
            }
            layout = _with_batch(job, Layout(**fields))
            if way == "ddp" and layout_problem(job, layout, Training()) is not None:
                layout = layout.model_copy(update={"data_parallel": "bucketed"})
            if layout_problem(job, layout, Training()) is None:
                yield layout


def _expert_ranks(job: Job, data_ranks: int) -> list[int]:
    moe = job.model.moe
    return [1] if moe is None else [ep for ep in divisors(data_ranks) if moe.experts % ep == 0]


def _turn(values: Sequence[Any], turn: int) -> Any:
    return values[turn % len(values)]


def _with_batch(job: Job, layout: Layout) -> Layout:
    """As few micro-batches as accumulation or the schedule need: more repeat what these prove."""
    each = job.sequences // layout.dp
    least = max(2, layout.pp * max(1, REGISTRY[layout.schedule].least_rounds)) if layout.pp > 1 else 2
    gas = next((count for count in divisors(max(1, each)) if count >= least), max(1, each))
    return layout.model_copy(update={"mbs": max(1, each // gas), "gas": gas})


def _uses(layout: Layout, technique: str) -> bool:
    value = getattr(layout, technique)
    return bool(value != "none") if technique == "recompute" else value > (0 if technique == "zero" else 1)


def spread(layouts: Sequence[Layout], most: int) -> list[Layout]:
    """A few of them that between them hold as many pairs of values as possible: the greedy choice of pairwise testing."""
    left = list(layouts)
    chosen: list[Layout] = []
    seen: set[tuple[Any, ...]] = set()
    while left and len(chosen) < most:
        best = max(left, key=lambda layout: len(_pairs(layout) - seen))
        chosen.append(best)
        seen |= _pairs(best)
        left.remove(best)
    return chosen


def _pairs(layout: Layout) -> set[tuple[Any, ...]]:
    """Pairs of values that are at work: the schedule of one stage, or the ring of one rank, is none."""
    idle = {
        "mbs": True,
        "gas": True,
        "schedule": layout.pp == 1,
        "virtual_stages": layout.pp == 1,
        "context_parallel": layout.cp == 1,
        "sequence_parallel": layout.tp == 1,
        "data_parallel": layout.zero > 0 or layout.data_ranks == 1,
    }
    return set(combinations(sorted((name, value) for name, value in layout.model_dump().items() if not idle.get(name)), 2))
