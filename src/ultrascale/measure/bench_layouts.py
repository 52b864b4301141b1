"""What `bench layouts` measures: a plan's layout with one field changed at a time, or the planner's best for this machine.

No torch and no database here: words become configurations that the engine can run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ultrascale.cost.columns import CHOICES
from ultrascale.cost.estimate import estimate
from ultrascale.cost.legality import divisors
from ultrascale.plan.search import plan as search
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.estimate import Estimate
from ultrascale.specs.layout import Layout, field_value
from ultrascale.specs.plan import Plan
from ultrascale.specs.validate import shown
from ultrascale.train import supported
from ultrascale.train.request import Overrides, Request, from_plan

VARIED = tuple(name for name in Layout.model_fields if name not in ("zero_shards", "offload"))
MOST_ON_CPU = 16  # processes that a plan may start here without being asked
MOST_VALUES = 8
SEARCHED = 4  # candidates of the search for each that is measured: the engine does not run every layout
_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|m|min|h)?\s*\Z", re.IGNORECASE)
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600}


@dataclass(frozen=True)
class Configuration:
    """One layout to measure. Its name is what distinguishes it: `tp=2`, or its place in the planner's ranking."""

    name: str
    request: Request
    predicted: Estimate | None

    @property
    def layout(self) -> Layout:
        return self.request.layout


@dataclass(frozen=True)
class Asked:
    """All of one call, the plan's own layout or the planner's first choice at the head."""

    base: Request
    configurations: tuple[Configuration, ...]
    left_out: tuple[str, ...] = ()
    """layouts that cannot run, and why"""
    ranked: bool = False
    """by the planner, and not varied"""


def base_request(plan: Plan, nproc: int | None, steps: int, gpus: int) -> Request:
    """The plan on this machine, for some steps on random tokens; nothing of it is kept."""
    world = nproc or plan.layout.gpus
    if gpus and world > gpus:
        raise SpecError(f"{world} processes are asked for but this machine shows {gpus} GPUs: try --nproc {gpus}")
    if not gpus and nproc is None and world > MOST_ON_CPU:
        raise SpecError(f"the plan has {world:,} GPUs and this machine has none: say how many processes, such as --nproc 2")
    changes = Overrides(train={"steps": steps, "data": "synthetic", "warmup_steps": 0}, checkpoint={"save": False})
    return from_plan(plan, changes, world, gpu=bool(gpus))


def varied(plan: Plan, base: Request, words: str, cluster: Cluster | None) -> Asked:
    """One field at a time from the plan's layout; dp and gas follow, so that processes and batch stay."""
    changes = [(name, value) for name, values in _wishes(words, base) for value in values]
    found: dict[Layout, Configuration] = {base.layout: _configuration("the plan", base, cluster)}
    left_out = []
    for name, value in changes:
        if value == getattr(base.layout, name):
            continue
        word = f"{name}={str(value).lower() if isinstance(value, bool) else value}"
        try:
            changed = from_plan(
                plan.model_copy(update={"job": base.job, "layout": base.layout}),
                Overrides(layout={name: value}),
                base.layout.gpus,
                base.training,
            )
        except SpecError as error:
            left_out.append(f"{word}: {str(error).split('. Layouts of')[0].split('; with ')[0]}")
            continue
        if changed.layout not in found:
            found[changed.layout] = _configuration(word, replace(base, layout=changed.layout), cluster)
    return Asked(base, tuple(found.values()), tuple(left_out))


def _wishes(words: str, base: Request) -> Iterator[tuple[str, list[Any]]]:
    asked = [word.strip() for word in words.split(",") if word.strip()]
    if not asked:
        raise SpecError("--vary names no field of the layout: try --vary tp,mbs,recompute")
    for word in asked:
        name, equals, given = word.partition("=")
        if name not in VARIED:
            raise SpecError(f"--vary is {shown(words)}: {nearest(name, VARIED)}, such as --vary tp,mbs or --vary mbs=1:2:4")
        values = [field_value(name, text, "--vary") for text in given.split(":")] if equals else _values(name, base)
        yield name, values


def _values(name: str, base: Request) -> list[Any]:
    """What a field can be here; whether the engine runs it is seen later."""
    if name in ("dp", "tp", "pp", "cp", "ep"):
        return divisors(base.layout.gpus)
    if name in ("mbs", "gas"):
        each = base.job.sequences // base.layout.dp
        return [size for size in (2**power for power in range(30)) if each % size == 0][:MOST_VALUES]
    if name == "zero":
        return [0, 1, 2, 3]
    if name == "virtual_stages":
        return [1, 2, 4]
    return list(CHOICES.get(name, (True, False)))


def ranked(base: Request, cluster: Cluster, top: int) -> Asked:
    """The planner's best for the plan's job on this machine, best first; those that the engine does not run are left out."""
    here = base.on(cluster)
    result = search(here.job, top=top * SEARCHED, explain=False)
    if not result.plans:
        raise SpecError(f"nothing fits: no layout of {here.job.model.name} on {cluster.label}, by the estimate")
    runs: list[Plan] = []
    left_out: list[str] = []
    for plan in result.plans:
        problem = supported.layout_problem(here.job, plan.layout, base.training)
        if problem is not None:
            left_out.append(f"{plan.layout}: {problem}")
        elif len(runs) < top:
            runs.append(plan)
    found = [Configuration(f"#{n}", replace(base, layout=one.layout), one.estimate) for n, one in enumerate(runs, 1)]
    if not found:
        raise SpecError(f"the engine runs none of the planner's best {len(result.plans)} layouts: {left_out[0]}")
    return Asked(base, tuple(found), tuple(left_out[:top]), ranked=True)


def _configuration(name: str, request: Request, cluster: Cluster | None) -> Configuration:
    if cluster is None:
        return Configuration(name, request, None)
    return Configuration(name, request, estimate(request.on(cluster).job, request.layout))


def winner(asked: Asked, configuration: Configuration, cluster: Cluster | None) -> Plan:
    """The fastest as a plan for this machine, or for the plan's own where this one's rates are not known."""
    request = asked.base if cluster is None else asked.base.on(cluster)
    predicted = configuration.predicted or estimate(request.job, configuration.layout)
    return Plan(job=request.job, layout=configuration.layout, estimate=predicted)


def duration(text: str, flag: str) -> float:
    """`30m`, `90s`, `1.5h`, or seconds."""
    match = _DURATION.match(text)
    if match is None or not float(match[1]):
        raise SpecError(f"{flag} is {shown(text)} but must be a time with s, m or h after it, such as 30m")
    return float(match[1]) * _SECONDS[(match[2] or "s").lower()]


def import_optuna() -> None:
    try:
        import optuna
    except ModuleNotFoundError as missing:
        raise SpecError(
            f"bench layouts keeps its trials with optuna, and {missing.name} is not installed: try pip install "
            "'ultrascale[bench]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
