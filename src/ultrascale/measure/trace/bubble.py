"""The pipeline's bubble as it was, beside the one that its schedule has with the same stage times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from ultrascale.measure.trace.step_intervals import TracedPass
from ultrascale.measure.trace.times import RankTime
from ultrascale.schedules import build
from ultrascale.schedules.simulate import StageTimes, simulate
from ultrascale.specs.errors import SpecError

US = 1e-6


@dataclass(frozen=True)
class Bubble:
    measured: float
    """idle share of all ranks' time between the step's first and last action"""
    scheduled: float
    """of the same schedule with the same stage times, where messages take no time and stages never vary"""
    schedule: str
    makespan_s: float
    stage_s: tuple[float, ...]
    """what all passes of one micro-batch take, by stage"""


def bubble(ranks: Sequence[RankTime]) -> Bubble | None:
    """None where no rank tells a pipeline's actions, or where not all of its ranks were traced."""
    pipelines: dict[tuple[int, ...], list[RankTime]] = defaultdict(list)
    for one in ranks:
        if one.run is not None and any(one.actions) and _layout(one)["pp"] > 1:
            place = one.run["place"]
            pipelines[place["dp"], place["cp"], place["tp"]].append(one)
    whole = [group for group in pipelines.values() if len(group) == _layout(group[0])["pp"]]
    if not whole:
        return None
    shares, spans = [], []
    for group in whole:
        for step in range(min(len(one.actions) for one in group)):
            found = [one.actions[step] for one in group]
            if all(found):
                span = max(one.end for rank in found for one in rank) - min(one.start for rank in found for one in rank)
                shares.append(1 - sum(one.busy for rank in found for one in rank) / (len(found) * span))
                spans.append(span)
    if not shares:
        return None
    layout = _layout(whole[0][0])
    times = _stage_times([one for group in whole for rank in group for step in rank.actions for one in step], layout)
    schedule = build(layout["schedule"], layout["pp"], layout["gas"], layout["virtual_stages"])
    stages = [sum(parts) for parts in zip(times.forward_s, times.input_grad_s, times.weight_grad_s, strict=True)]
    return Bubble(mean(shares), simulate(schedule, times).bubble_fraction, layout["schedule"], mean(spans) * US, tuple(stages))


def _layout(one: RankTime) -> dict[str, Any]:
    assert one.run is not None
    layout = one.run.get("layout")
    if not isinstance(layout, dict):
        raise SpecError(f"--trace {one.file} does not say how its run was cut: profile it again")
    return layout


def _stage_times(actions: Iterable[TracedPass], layout: dict[str, Any]) -> StageTimes:
    took: dict[tuple[str, int], list[float]] = defaultdict(list)
    for one in actions:
        took[one.name, one.stage].append(one.busy * US)

    def typical(name: str, stage: int) -> float:
        return mean(took[name, stage]) if took[name, stage] else 0.0

    stages = range(layout["pp"] * layout["virtual_stages"])
    weights = tuple(typical("weight gradients", stage) for stage in stages)
    inputs = tuple(
        typical("input gradients", stage) or max(0.0, typical("backward", stage) - weights[stage]) for stage in stages
    )
    return StageTimes(tuple(typical("forward", stage) for stage in stages), inputs, weights)
