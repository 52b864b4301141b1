"""Many plans at once: best layouts over models and nodes, each technique's scaling, the front of time and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ultrascale.cost.estimate import estimate
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.legality import problem
from ultrascale.cost.table import SearchTable
from ultrascale.plan.candidates import USUAL_VALUES, LayoutConstraints, cores
from ultrascale.plan.search import best_plan
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError
from ultrascale.specs.estimate import Estimate
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.units import GIB
from ultrascale.specs.validate import build

Progress = Callable[[str], None]
LARGE_CLUSTER_GPUS = 256  # a search over more takes seconds, and these figures make many
MAX_FRONT = 40  # layouts of a Pareto front
MAX_SLOWDOWN = 4.0  # times the fastest: slower layouts of a large cluster are not on its front
SEQUENCES_PER_GPU = 4  # in scaling curves: enough to fill a pipeline, few enough to show what communication costs


@dataclass(frozen=True)
class HeatmapCell:
    """The best layout of a model on so many nodes; None where nothing fits."""

    model: str
    nodes: int
    gpus: int
    layout: Layout | None
    estimate: Estimate | None


def heat_map(
    models: Sequence[Model],
    cluster: Cluster,
    nodes: Sequence[int],
    seq: int,
    batch_tokens: int,
    say: Progress = lambda _: None,
    **job: Any,
) -> tuple[HeatmapCell, ...]:
    """Every model on every number of the cluster's nodes, one batch for all, as in the playbook's chart.

    On a large cluster the usual values of each field are searched (`candidates.USUAL_VALUES`), not all.
    """
    cells = []
    for model in models:
        for count in nodes:
            say(f"{model.name} on {count} nodes")
            gpus = count * cluster.gpus_per_node
            values = {"model": model, "cluster": cluster.resized(gpus), "seq": seq, "batch_tokens": batch_tokens, **job}
            try:
                found = best_plan(build(Job, values, "job"), searched(gpus))
            except SpecError:  # the batch cannot be cut over so many GPUs, or a sequence is longer than the model's positions
                found = None
            layout, predicted = (found.layout, found.estimate) if found is not None else (None, None)
            cells.append(HeatmapCell(model.name, count, gpus, layout, predicted))
    return tuple(cells)


def searched(gpus: int) -> LayoutConstraints:
    """What a search of these figures tries: every value, or on a large cluster the usual ones."""
    return LayoutConstraints(tried=USUAL_VALUES if gpus > LARGE_CLUSTER_GPUS else {})


def heat_map_around(job: Job, say: Progress = lambda _: None) -> tuple[HeatmapCell, ...]:
    """The heat map about a job: its model between one half its size or smaller and one twice it or larger, of its family where
    that has one, on a quarter of its nodes to four times as many; without the sizes in between on a large cluster."""
    own, here = job.model, job.cluster.nodes

    def alike(models: Mapping[str, Model]) -> list[Model]:
        found = (one for one in models.values() if (one.moe is None, one.positions) == (own.moe is None, own.positions))
        return sorted(found, key=lambda model: model.parameters)

    family = alike(next((members for members in Model.preset_families().values() if own.name in members), {}))
    others = alike(Model.presets())
    smaller = [model for model in (*others, *family) if 2 * model.parameters <= own.parameters][-1:]
    larger = [model for model in (*family, *others) if model.parameters >= 2 * own.parameters][:1]
    factors = (1 / 4, 1, 4) if job.cluster.gpus > LARGE_CLUSTER_GPUS else (1 / 4, 1 / 2, 1, 2, 4)
    nodes = sorted({max(1, int(factor * here)) for factor in factors})
    rest = {name: value for name, value in job if name not in ("model", "cluster", "seq", "batch_tokens")}
    return heat_map([*smaller, own, *larger], job.cluster, nodes, job.seq, job.batch_tokens, say, **rest)


@dataclass(frozen=True)
class ScalingPoint:
    """One technique alone at one degree; no estimate where the layout is not legal."""

    technique: str
    gpus: int
    estimate: Estimate | None


TECHNIQUES: dict[str, Callable[[int], dict[str, Any]]] = {
    "data": lambda n: {"dp": n},
    "ZeRO-1": lambda n: {"dp": n, "zero": 1},
    "ZeRO-3": lambda n: {"dp": n, "zero": 3},
    "tensor": lambda n: {"tp": n},
    "context": lambda n: {"cp": n},
    "pipeline": lambda n: {"pp": n},
}


def scaling(job: Job, most: int, recompute: str = "none") -> tuple[ScalingPoint, ...]:
    """Each technique alone on 1, 2, 4 … GPUs, with as many tokens a GPU at every size."""
    points = []
    for name, fields in TECHNIQUES.items():
        gpus = 1
        while gpus <= most:
            values = fields(gpus)
            if gpus == 1:
                values = {}
            layout = Layout(mbs=1, recompute=recompute, gas=SEQUENCES_PER_GPU * gpus // values.get("dp", 1), **values)
            grown = job.changed(cluster=job.cluster.resized(gpus), batch_tokens=layout.batch_tokens(job.seq))
            legal = problem(grown, layout) is None
            points.append(ScalingPoint(name, gpus, estimate(grown, layout) if legal else None))
            gpus *= 2
    return tuple(points)


def front(job: Job) -> tuple[tuple[Layout, Estimate], ...]:
    """Layouts that no other beats in both step time and peak memory, fastest first, of all that fit.

    On a large cluster: of the usual values of each field, and not much slower than the fastest.
    """
    large = job.cluster.gpus > LARGE_CLUSTER_GPUS
    machine, capacity = ClusterRates(job), job.cluster.gpu.memory_gib * GIB
    found: list[tuple[float, float, Layout]] = []
    for group in cores(job, searched(job.cluster.gpus)):
        longest_s = MAX_SLOWDOWN * min(step_s for step_s, _, _ in found) if large and found else np.inf
        cells = SearchTable(job, group.columns, group.variants, machine).evaluate(capacity, longest_s)
        finite = np.flatnonzero(np.isfinite(cells.step_s))
        if not len(finite):
            continue
        step, peak = cells.step_s.ravel()[finite], cells.peak_bytes.ravel()[finite]
        keep = finite[_undominated(step, peak)]
        core, variant = np.unravel_index(keep, cells.step_s.shape)
        rows = cells.layouts(np.asarray(core), np.asarray(variant))
        pairs = zip(cells.step_s.ravel()[keep], cells.peak_bytes.ravel()[keep], strict=True)
        found += [(float(s), float(p), rows.layout(i)) for i, (s, p) in enumerate(pairs)]
    if not found:
        return ()
    best = _undominated(np.asarray([one[0] for one in found]), np.asarray([one[1] for one in found]))
    most = MAX_FRONT // 2 if large else MAX_FRONT
    selected = best if len(best) <= most else best[np.linspace(0, len(best) - 1, most).round().astype(int)]
    exact = [(found[i][2], estimate(job, found[i][2])) for i in selected]
    order = _undominated(np.asarray([e.step_time_s for _, e in exact]), np.asarray([e.peak_gib for _, e in exact]))
    return tuple(exact[i] for i in order)


def _undominated(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Indices of points with no other at or below them in both, by the first."""
    order = np.lexsort((second, first))
    least = np.minimum.accumulate(second[order])
    better = np.concatenate(([True], second[order][1:] < least[:-1]))
    return order[better]
