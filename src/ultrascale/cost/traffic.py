"""Every technique's communication of one step on one GPU: bytes sent, calls, time, and what of it is exposed.

Ranks of one pipeline stage send the same; stages differ by their layers and by what the ends have besides.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ultrascale.cost import stages
from ultrascale.cost.columns import LayoutColumns
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.traffic_calls import Stage, calls_of, hops
from ultrascale.specs.estimate import Time, Traffic
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout


def by_technique(job: Job, layout: Layout, machine: ClusterRates, time: Time) -> list[Traffic]:
    """The rank with the most layers, between two others if there is one.

    The exposed seconds of a technique are shared out over its calls by their time.
    """
    ranks = LayoutColumns.of([layout]).take(np.zeros(layout.pp, dtype=np.int64))
    layers = stages.share_of(job, ranks, np.arange(layout.pp)).layers
    busiest = max(range(layout.pp), key=lambda stage: (layers[stage], hops(layout, stage)))
    exposed = {
        "tensor": time.tensor_s,
        "context": time.context_s,
        "expert": time.expert_s,
        "zero": time.zero_s + (time.data_s if layout.zero else 0.0),
        "data": time.data_s if not layout.zero else 0.0,
        "pipeline": time.send_s,
    }
    rows = list(of_stage(job, layout, machine, busiest))
    spent: dict[str, float] = {}
    for one in rows:
        spent[one.technique] = spent.get(one.technique, 0.0) + one.time_s
    return [
        one.model_copy(
            update={"exposed_s": exposed[one.technique] * one.time_s / spent[one.technique] if spent[one.technique] else 0.0}
        )
        for one in rows
    ]


def of_stage(job: Job, layout: Layout, machine: ClusterRates, stage: int) -> Iterator[Traffic]:
    """What a rank of that pipeline stage sends, each exchange once; nobody says here what computing hides of it."""
    for moved, calls in calls_of(Stage.of(job, layout, machine, stage)):
        yield Traffic(
            technique=moved.technique,
            collective=moved.collective,
            group=int(moved.group.size[0]),
            per_domain=int(moved.group.per_domain[0]),
            bytes=calls * float(moved.wire_bytes[0]),
            calls=calls,
            time_s=calls * float(moved.time_s[0]),
            exposed_s=0.0,
        )
