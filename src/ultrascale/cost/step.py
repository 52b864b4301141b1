"""What follows the last backward of a step: gradients meet, the optimizer steps, parameters spread."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultrascale.cost import data, host, zero
from ultrascale.cost.columns import Array, LayoutColumns
from ultrascale.cost.components import ComponentTotals
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.memory.parameters import RankParameters, on_rank
from ultrascale.cost.memory.states import compute_bytes, gradient_bytes
from ultrascale.cost.mesh import GroupPlacement
from ultrascale.cost.operators import optimizer_bytes, stepped_gradient_bytes
from ultrascale.cost.overlap import exposed, transfer
from ultrascale.cost.passes import Passes
from ultrascale.cost.stages import RankShare
from ultrascale.specs.job import Job


@dataclass(frozen=True)
class EndOfStep:
    data_s: Array
    """exposed reduction of gradients (ZeRO-0), or scatter, gather and HSDP's reduction (ZeRO-1 to 3)"""
    optimizer_s: Array
    offload_s: Array
    launch_s: Array
    """idle for want of launches in the whole step, where one queue runs through it"""
    overhead_s: float
    """the host's own work where nothing hides it; a queue's idle time has what is seen of it"""

    @property
    def total(self) -> Array:
        return np.asarray(self.data_s + self.optimizer_s + self.offload_s + self.launch_s + self.overhead_s)


def end_of_step(
    job: Job, columns: LayoutColumns, machine: ClusterRates, places: GroupPlacement, share: RankShare, totals: ComponentTotals
) -> EndOfStep:
    one_microbatch = totals.on(share)
    held = on_rank(job.model, columns, share)
    backward, forward = one_microbatch.input_grad + one_microbatch.weight_grad, one_microbatch.forward
    reduced = data.traffic(job, columns, places, machine, held.trunk, held.experts)
    sharded = zero.traffic(job, columns, places, machine, held.trunk, held.experts)
    replicas = transfer(machine, "data", "all_reduce", gradient_bytes(job) * held.total / columns.shards, places.replica)
    level = columns.zero
    # ZeRO-2 and 3 scattered their gradients with each micro-batch; HSDP's replicas still have to meet once a step.
    after_backward = (level == 1) & (job.framework.accumulation == "after-backward")
    whole = (level == 0) | after_backward
    reduction = np.where(whole, reduced.time_s, np.where(level == 1, sharded.scatter_s, 0.0))
    reduction = reduction + np.where(level >= 1, replicas.time_s, 0.0)
    hidden = np.where(after_backward, 0.0, job.framework.overlap)
    wait = data.exposed_s(columns, machine, hidden * reduction, backward, share.layers) + (1 - hidden) * reduction
    # The stepped parameters are gathered layer by layer, just ahead of the next step's first forward.
    gathered = np.where((level == 1) | (level == 2), sharded.gather_s, 0.0)
    wait = wait + exposed(gathered, job.framework.overlap * forward, machine.efficiency)
    optimizer, offload = _optimizer(job, columns, machine, held, forward, backward)
    if host.one_queue(job, columns, machine):
        head = totals.head.scaled(share.head)
        late = wait * (1 - 1 / np.maximum(share.layers, 1))  # of all layers but the last
        starts = host.kernel_starts_s(job, columns, share)
        optimizer = optimizer + starts[2]
        layers = one_microbatch - head + Passes(starts[0], starts[1], np.zeros(len(columns)))
        idle = host.idle_s(job, columns, machine, share, layers, head, optimizer, late)
        return EndOfStep(np.asarray(wait), optimizer, offload, idle + columns.gas * (starts[0] + starts[1]), 0.0)
    if machine.efficiency.synchronous:
        optimizer = optimizer + host.cpu_optimizer_s(job.model, machine, share.layers)
    elif job.framework.fused_blocks:
        optimizer = np.maximum(optimizer, host.weights_launch_s(job.model, machine, share.layers))
    return EndOfStep(np.asarray(wait), optimizer, offload, np.zeros(len(columns)), machine.efficiency.step_overhead_s)


def _optimizer(
    job: Job, columns: LayoutColumns, machine: ClusterRates, held: RankParameters, forward: Array, backward: Array
) -> tuple[Array, Array]:
    """Reading and writing every state once, and the gradient once more for its norm; or doing so on the host."""
    expert_shards = np.maximum(1, columns.shards * columns.tp / columns.expert_cut / columns.ep)
    own = np.where(columns.zero >= 1, held.trunk / columns.shards + held.experts / expert_shards, held.total)
    b, g = compute_bytes(job), stepped_gradient_bytes(job, columns)
    on_gpu = machine.stream_s(own * optimizer_bytes(job, columns)) * job.framework.optimizer_passes
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
