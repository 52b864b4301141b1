"""The time of a step for every row of a table of layouts, in closed form; the search ranks with it, the simulator confirms."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultrascale.cost import data, params, pipeline, zero
from ultrascale.cost.activations import compute_bytes
from ultrascale.cost.columns import CHOICES, Array, Columns
from ultrascale.cost.hardware import Machine
from ultrascale.cost.memory import gradient_bytes
from ultrascale.cost.mesh import Mesh, mesh
from ultrascale.cost.overlap import exposed, transfer
from ultrascale.cost.passes import Passes
from ultrascale.cost.pieces import DEPENDS_ON, pieces
from ultrascale.cost.stages import RankShare, representative_ranks, share_of
from ultrascale.schedules import closed
from ultrascale.specs.job import OPTIMIZER_STATE_BYTES, Job


@dataclass(frozen=True)
class EndOfStep:
    """What follows the pipeline: gradients meet, parameters are stepped and spread."""

    data_s: Array
    """exposed reduction of gradients (ZeRO-0), or scatter, gather and HSDP's reduction (ZeRO-1 to 3)"""
    optimizer_s: Array
    offload_s: Array

    @property
    def total(self) -> Array:
        return np.asarray(self.data_s + self.optimizer_s + self.offload_s)


def step_time_s(job: Job, columns: Columns, machine: Machine) -> Array:
    """Seconds of one optimizer step per row."""
    distinct, inverse = columns.distinct(DEPENDS_ON)
    totals = pieces(job, distinct, machine).totals().take(inverse)
    ranks = [totals.on(share_of(job.model, columns, rank)) for rank in representative_ranks(columns)]
    slowest = _slowest(ranks)
    first = ranks[0]
    places = mesh(columns, machine.cluster.fast_domain)
    send = pipeline.hop(job, columns, places, machine).time_s
    in_pipeline = _makespan(job, columns, totals.on(_whole(job, columns)), slowest, send)
    after = end_of_step(job, columns, machine, places, share_of(job.model, columns, np.zeros_like(columns.pp)), first)
    return np.asarray(in_pipeline + after.total + machine.efficiency.step_overhead_s)


def _slowest(ranks: list[Passes]) -> Passes:
    best = ranks[0]
    for other in ranks[1:]:
        slower = other.total > best.total
        best = Passes(
            np.where(slower, other.forward, best.forward),
            np.where(slower, other.input_grad, best.input_grad),
            np.where(slower, other.weight_grad, best.weight_grad),
        )
    return best


def _whole(job: Job, columns: Columns) -> RankShare:
    one = np.ones_like(columns.pp)
    return RankShare(0 * one, job.model.dense_layers * one, job.model.moe_layers * one, one, one)


def _makespan(job: Job, columns: Columns, whole: Passes, slowest: Passes, send: Array) -> Array:
    result = np.asarray(columns.gas * slowest.total)
    for code in np.unique(columns.schedule):
        rows = np.flatnonzero((columns.schedule == code) & (columns.pp > 1))
        if len(rows):
            result[rows] = closed.makespan(
                CHOICES["schedule"][code],
                columns.pp[rows],
                columns.gas[rows],
                columns.virtual_stages[rows],
                whole.forward[rows],
                whole.input_grad[rows],
                whole.weight_grad[rows],
                slowest.forward[rows],
                slowest.input_grad[rows],
                slowest.weight_grad[rows],
                send[rows],
            )
    return result


def end_of_step(
    job: Job, columns: Columns, machine: Machine, places: Mesh, share: RankShare, one_microbatch: Passes
) -> EndOfStep:
    held = params.on_rank(job.model, columns, share)
    backward, forward = one_microbatch.input_grad + one_microbatch.weight_grad, one_microbatch.forward
    reduced = data.traffic(job, columns, places, machine, held.trunk, held.experts)
    sharded = zero.traffic(job, columns, places, machine, held.trunk, held.experts)
    replicas = transfer(machine, "data", "all_reduce", gradient_bytes(job) * held.total / columns.shards, places.replica)
    level = columns.zero
    # ZeRO-2 and 3 scattered their gradients with each micro-batch; HSDP's replicas still have to meet once a step.
    reduction = np.where(level == 0, reduced.time_s, np.where(level == 1, sharded.scatter_s, 0.0))
    reduction = reduction + np.where(level >= 1, replicas.time_s, 0.0)
    wait = data.exposed_s(columns, machine, reduction, backward, share.layers)
    # The stepped parameters are gathered layer by layer, just ahead of the next step's first forward.
    gathered = np.where((level == 1) | (level == 2), sharded.gather_s, 0.0)
    wait = wait + exposed(gathered, forward, machine.efficiency)
    optimizer, offload = _optimizer(job, columns, machine, held, forward, backward)
    return EndOfStep(np.asarray(wait), optimizer, offload)


def _optimizer(
    job: Job, columns: Columns, machine: Machine, held: params.RankParameters, forward: Array, backward: Array
) -> tuple[Array, Array]:
    """Reading and writing every state once, and the gradient once more for its norm; or doing so on the host."""
    expert_shards = np.maximum(1, columns.shards / columns.ep)
    own = np.where(columns.zero >= 1, held.trunk / columns.shards + held.experts / expert_shards, held.total)
    b, g, state = compute_bytes(job), gradient_bytes(job), OPTIMIZER_STATE_BYTES[job.optimizer]
    mixed = b if job.precision != "fp32" else 0
    on_gpu = machine.stream_s(own * (2 * g + 2 * 4 + 2 * state + mixed))
    norm = machine.stream_s(own * g)
    host_link = machine.gpu.pcie_bandwidth_gb_s * 1e9 * machine.efficiency.host_link
    adam = own * machine.cluster.gpus_per_node / (machine.efficiency.host_adam_gparams_s * 1e9)
    on_host = own * (g + b) / host_link + adam
    # Offloaded parameters cross the host link before every forward and backward.
    fetch = own * b / host_link
    fetched = exposed(fetch, forward, machine.efficiency) + exposed(fetch, backward, machine.efficiency)
    away = ~columns.is_("offload", "none")
    offload = np.where(away, on_host, 0.0) + np.where(columns.is_("offload", "parameters"), columns.gas * fetched, 0.0)
    return np.where(away, norm, on_gpu), np.asarray(offload)
