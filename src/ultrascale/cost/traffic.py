"""Every technique's communication of one step on one GPU: bytes sent, calls, time, and what of it is exposed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ultrascale.cost import context, data, expert, operators, params, pipeline, stages, tensor, zero
from ultrascale.cost.activations import gradient_bytes
from ultrascale.cost.columns import Columns
from ultrascale.cost.hardware import Machine
from ultrascale.cost.mesh import mesh
from ultrascale.cost.overlap import Transfer, transfer
from ultrascale.specs.estimate import Time, Traffic
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout


def by_technique(job: Job, layout: Layout, machine: Machine, time: Time) -> list[Traffic]:
    """The rank with the most layers; the exposed seconds of a technique are shared out over its calls by their time."""
    rows: list[tuple[str, Transfer, float]] = list(_calls(job, layout, machine))
    exposed = {
        "tensor": time.tensor_s,
        "context": time.context_s,
        "expert": time.expert_s,
        "zero": time.zero_s + (time.data_s if layout.zero else 0.0),
        "data": time.data_s if not layout.zero else 0.0,
        "pipeline": time.send_s,
    }
    spent: dict[str, float] = {}
    for technique, moved, calls in rows:
        spent[technique] = spent.get(technique, 0.0) + calls * float(moved.time_s[0])
    return [
        Traffic(
            technique=technique,
            collective=moved.collective,
            group=int(moved.group.size[0]),
            per_domain=int(moved.group.per_domain[0]),
            bytes=calls * float(moved.wire_bytes[0]),
            calls=calls,
            time_s=calls * float(moved.time_s[0]),
            exposed_s=exposed[technique] * calls * float(moved.time_s[0]) / spent[technique] if spent[technique] else 0.0,
        )
        for technique, moved, calls in rows
    ]


def _calls(job: Job, layout: Layout, machine: Machine) -> Iterator[tuple[str, Transfer, float]]:
    row = Columns.of([layout])
    places = mesh(row, machine.cluster)
    shares = stages.share_of(job, row.take(np.zeros(layout.pp, dtype=np.int64)), np.arange(layout.pp))
    busiest = int(np.argmax(shares.layers))
    layers, moe_layers, gas = int(shares.layers[busiest]), int(shares.moe_layers[busiest]), layout.gas
    forwards = 2 if layout.recompute == "full" else 1
    if layout.tp > 1:
        inside = tensor.traffic(job, row, places, machine)
        regions = tensor.REGIONS * layers * gas
        if layout.sequence_parallel:
            # Each pass enters and leaves a region once; backward also gathers the saved inputs again.
            yield "tensor", inside.gather, regions * (forwards + 2)
            yield "tensor", inside.scatter, regions * (forwards + 1)
        else:
            yield "tensor", inside.reduce, regions * (forwards + 1)
    if layout.cp > 1:
        yield from _context_calls(job, layout, machine, row, layers * gas, forwards)
    if layout.ep > 1 and moe_layers:
        exchange = expert.traffic(job, row, places, machine).exchange
        yield "expert", exchange, expert.EXCHANGES * moe_layers * gas * (forwards + 1)
    if layout.pp > 1:
        # Forward sends an activation per chunk, backward a gradient; the ends of the pipeline send one of the two less.
        yield "pipeline", pipeline.hop(job, row, places, machine), 2.0 * gas * layout.virtual_stages
    share = stages.share_of(job, row, np.zeros(1, dtype=np.int64))
    held = params.on_rank(job.model, row, share)
    if layout.data_ranks == 1:
        return
    if layout.zero == 0:
        reduced = data.traffic(job, row, places, machine, held.trunk, held.experts)
        yield "data", reduced.reduce, 1
        if moe_layers and int(reduced.expert_reduce.group.size[0]) > 1:
            yield "data", reduced.expert_reduce, 1
        return
    moved = zero.traffic(job, row, places, machine, held.trunk, held.experts)
    gathers = {1: 1, 2: 1, 3: gas * (1 if layout.keep_gathered else 2)}[layout.zero]
    scatters = 1 if layout.zero == 1 else gas
    if layout.shards > 1:
        yield "zero", moved.gather, gathers
        yield "zero", moved.scatter, scatters
        if moe_layers and int(moved.expert_gather.group.size[0]) > 1:
            yield "zero", moved.expert_gather, gathers
            yield "zero", moved.expert_scatter, scatters
    if layout.data_ranks > layout.shards:
        own = gradient_bytes(job) * held.total / layout.shards
        yield "zero", transfer(machine, "zero", "all_reduce", own, places.replica), 1


def _context_calls(
    job: Job, layout: Layout, machine: Machine, row: Columns, passes: int, forwards: int
) -> Iterator[tuple[str, Transfer, float]]:
    places = mesh(row, machine.cluster)
    around = context.traffic(job, row, places, machine, operators.layer(job, row, machine, moe=False).attention)
    if layout.context_parallel == "allgather":
        yield "context", around.gather, passes * (forwards + 1)
        yield "context", around.scatter, passes
    elif layout.context_parallel == "ulysses":
        yield "context", around.switch, passes * (forwards + 1)
    else:
        # Backward's blocks carry the gradients too: two blocks' bytes each.
        yield "context", around.block, passes * (layout.cp - 1) * (forwards + 2)
