"""Time of one step: the components a model is cut into, by cause and per micro-batch, and what follows the last backward.

A rank's time is a sum of its components (a layer of each kind, embedding, head), so every layout, rank and chunk is a linear
combination of these few.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Generic, TypeVar

import numpy as np

from ultrascale.cost import communication, host, muon, operators
from ultrascale.cost.columns import NAMES, NOTHING, Array, Passes, RankShare, rows_of
from ultrascale.cost.communication import TensorTraffic
from ultrascale.cost.hardware import Workload
from ultrascale.cost.memory import activations, states
from ultrascale.cost.memory.states import compute_bytes, fp8_layer_mean, gradient_bytes, trained_fraction, uses_fused_blocks
from ultrascale.cost.network import exposed, transfer
from ultrascale.cost.operators import LayerTime, optimizer_bytes, stepped_gradient_bytes
from ultrascale.specs import weights
from ultrascale.specs.blocks import LayerKind
from ultrascale.specs.job import OPTIMIZERS, Job


def compute_depends_on(job: Job) -> tuple[str, ...]:
    """What a component's time depends on beside ZeRO; a clock that follows the work follows the optimizer's, too."""
    if job.cluster.efficiency.boost > 1:
        return NAMES
    names = ("tp", "cp", "ep", "mbs", "sequence_parallel", "context_parallel", "recompute", "dispatcher", "schedule")
    # How experts are cut follows from dp; with dp itself 2.4 times as many rows of DeepSeek-V3 on 2,048 GPUs would differ. One
    # micro-batch on one GPU leaves its gradients as they were made.
    of_experts = ["expert_cut", "has_pipeline"] if job.model.moe is not None else []
    return (*names, *of_experts, *(["gas"] if job.cluster.gpus == 1 else []))


NO_TIME = Passes()


@dataclass(frozen=True)
class ComponentTime:
    """Seconds by cause; communication only as far as it is exposed."""

    matmul: Passes = NO_TIME
    attention: Passes = NO_TIME
    memory_bound: Passes = NO_TIME
    recompute: Passes = NO_TIME
    launch: Passes = NO_TIME
    tensor: Passes = NO_TIME
    context: Passes = NO_TIME
    expert: Passes = NO_TIME
    zero: Passes = NO_TIME

    @property
    def total(self) -> Passes:
        return functools.reduce(Passes.__add__, self._causes)

    def scaled(self, factor: Array) -> ComponentTime:
        return ComponentTime(*(passes.scaled(factor) for passes in self._causes))

    def __add__(self, other: ComponentTime) -> ComponentTime:
        return ComponentTime(*map(Passes.__add__, self._causes, other._causes))

    @property
    def _causes(self) -> list[Passes]:
        return [getattr(self, field.name) for field in fields(self)]


AnyTime = TypeVar("AnyTime", Passes, ComponentTime)
Part = TypeVar("Part")
OtherPart = TypeVar("OtherPart")


@dataclass(frozen=True)
class ComponentTimes(Generic[Part]):
    """Of one micro-batch, by cause or with the causes added up, which is what the search needs."""

    layers: tuple[Part, ...]
    """one of each kind"""
    embedding: Part
    head: Part
    kept: tuple[Part, ...] = ()
    """layers that recompute nothing; empty: no row has both"""

    def on(self: ComponentTimes[AnyTime], share: RankShare) -> AnyTime:
        """A rank's (or a chunk's) time."""
        total = self.embedding.scaled(share.embedding) + self.head.scaled(share.head)
        for one, (_, count, kept) in zip(self.layers, share.each(), strict=True):
            total = total + one.scaled(count - kept)
        for one, (_, _, kept) in zip(self.kept, share.each(), strict=False):
            total = total + one.scaled(kept)
        return total

    def totals(self: ComponentTimes[ComponentTime]) -> ComponentTimes[Passes]:
        return self.each(lambda one: one.total)

    def each(self, change: Callable[[Part], OtherPart]) -> ComponentTimes[OtherPart]:
        layers, kept = (tuple(map(change, some)) for some in (self.layers, self.kept))
        return ComponentTimes(layers, change(self.embedding), change(self.head), kept)


@dataclass(frozen=True)
class _Component:
    """One component but for ZeRO's transfers, and what these depend on."""

    time: ComponentTime
    elements: Array
    experts: Array
    window: Passes
    """compute that hides no other transfer"""
    in_fp8: Array
    """elements that are gathered in fp8"""

    def timed(self, work: Workload) -> ComponentTime:
        return replace(self.time, zero=_zero(work, self))


def component_times(work: Workload) -> ComponentTimes[ComponentTime]:
    return _components(work).each(lambda one: one.timed(work))


def compute_totals(work: Workload) -> ComponentTimes[Passes]:
    """Causes added up, without ZeRO's."""
    return _components(work).each(lambda one: one.time.total)


def component_totals(work: Workload) -> ComponentTimes[Passes]:
    """All causes added up, for many rows: what does not depend on ZeRO is computed once for rows that are alike."""
    alike, of = work.columns.distinct(compute_depends_on(work.job))

    def total(one: _Component) -> Passes:
        return rows_of(one.time.total, of) + _zero(work, rows_of(replace(one, time=ComponentTime()), of))

    return _components(Workload(work.job, alike, work.machine)).each(total)


def _components(work: Workload) -> ComponentTimes[_Component]:
    job, columns, machine = work.job, work.columns, work.machine
    clock = operators.clock(job, columns, machine)
    inside = communication.tensor_traffic(work)
    layers = _layers(work, inside, clock)
    embedding = _end(work, inside, operators.embedding(job, columns, machine), is_head=False)
    head = _end(work, inside, operators.head(job, columns, machine, clock), is_head=True)
    kept = _layers(work, inside, clock, recomputes=False) if np.any(columns.recompute_layers) else ()
    return ComponentTimes(layers, embedding, head, kept)


def _layers(work: Workload, inside: TensorTraffic, clock: Array, recomputes: bool = True) -> tuple[_Component, ...]:
    """One of each kind."""

    def timed(kind: LayerKind) -> _Component:
        compute = operators.layer(work.job, work.columns, work.machine, kind, clock)
        return _layer(work, inside, compute, kind, recomputes)

    return tuple(map(timed, work.job.model.layer_kinds))


def _selective_recompute_s(work: Workload, compute: LayerTime, kind: LayerKind) -> Array:
    """Forward that selective recomputation repeats."""
    fused = uses_fused_blocks(work.job, work.columns)
    gate_and_up = [matmul for matmul in compute.matmuls if matmul.name == "mlp up"]
    return np.where(fused, operators.matmul_passes(work.machine, gate_and_up).forward, _plain_selective_s(work, compute, kind))


def _plain_selective_s(work: Workload, compute: LayerTime, kind: LayerKind) -> Array:
    """The same of layers that are not fused."""
    policy = states.selective_policy(work.job)
    if policy in ("attention", "scores"):
        return compute.attention.forward
    cheap = NOTHING if policy == "latents" else compute.memory_bound.forward - compute.never_repeated
    if work.job.framework.exact_memory_trace and kind.mixer in ("linear", "mamba"):
        cheap = cheap + compute.attention.forward
    if repeated := operators.selective_matmuls(work.job, work.columns, kind):
        return cheap + operators.matmul_passes(work.machine, repeated).forward
    if work.job.model.mla is not None:
        up = [matmul for matmul in compute.matmuls if matmul.name in operators.LATENT_MATMULS]
        return cheap + operators.matmul_passes(work.machine, up).forward
    return cheap


def _context(work: Workload, attention: Passes, kind: LayerKind) -> tuple[Passes, Passes]:
    """What context parallelism adds to a layer, and what of its communication is hidden."""
    if kind.mixer == "attention":
        around = communication.context_traffic(work, attention)
        return Passes(around.forward_s, around.backward_s), Passes(around.overlapped_forward_s, around.overlapped_backward_s)
    if kind.mixer == "none":
        return Passes(), Passes()
    exchanged_s = np.where(work.columns.cp > 1, communication.state_exchange(work, kind.mixer).time_s, 0.0)
    return Passes(exchanged_s, exchanged_s), Passes()


def _layer(work: Workload, inside: TensorTraffic, compute: LayerTime, kind: LayerKind, recomputes: bool) -> _Component:
    job, columns, machine, moe = work.job, work.columns, work.machine, kind.has_experts
    context_passes, context_overlap = _context(work, compute.attention, kind)
    layer_s, gather_again_s = inside.layer_s(kind), inside.gather_again_s(kind)
    again = exposed(gather_again_s, compute.matmul.input_grad, machine.efficiency)
    # Cut into tp pieces, a collective hides behind matmuls; backward's share the window with the second gather.
    pieced = communication.tensor_pieced_s(work, inside, kind)
    overlapped_again = np.minimum(gather_again_s, compute.matmul.input_grad)
    rest = compute.matmul.input_grad + compute.matmul.weight_grad - overlapped_again
    tensor_passes = Passes(
        layer_s - pieced + exposed(pieced, compute.matmul.forward, machine.efficiency),
        layer_s - pieced + exposed(pieced, rest, machine.efficiency) + again,
    )
    overlapped_forward = context_overlap.forward + np.minimum(pieced, compute.matmul.forward)
    overlapped_backward = context_overlap.input_grad + overlapped_again + np.minimum(pieced, rest)
    expert_passes = Passes()
    if moe:
        routed = communication.expert_traffic(work)
        expert_passes = Passes(routed.forward_s, routed.backward_s)
        overlapped_forward = overlapped_forward + routed.overlapped_forward_s
        overlapped_backward = overlapped_backward + routed.overlapped_backward_s
    if not machine.efficiency.synchronous and not moe:  # the host goes on while collectives run; routing waits for its counts
        compute = replace(compute, launch=host.launches_beyond_communication(compute.launch, tensor_passes + context_passes))
    forward = compute.total.forward + tensor_passes.forward + context_passes.forward + expert_passes.forward
    last = NOTHING
    if not moe:
        # torch.utils.checkpoint stops at the last tensor that backward asks for; a layer's output is not among them.
        down = [matmul for matmul in compute.matmuls if matmul.name == operators.last_matmul(kind)]
        last = np.where(states.stops_early(job, columns), operators.matmul_passes(machine, down).forward, 0.0)
    repeated = np.where(columns.is_("recompute", "full"), forward - last, 0.0)
    selective = _selective_recompute_s(work, compute, kind)
    if job.framework.context == "flex":
        selective = selective + context_passes.forward
    repeated = np.where(columns.is_("recompute", "selective"), selective, repeated)
    repeated = repeated if recomputes else 0.0 * repeated
    layer = states.layer_parameters(job.model, columns, kind)
    elements, experts = layer.trunk, layer.experts
    free = compute.total + Passes(-overlapped_forward, repeated - overlapped_backward)
    accumulated = _weight_passes(work, elements + experts)
    time = ComponentTime(
        matmul=compute.matmul,
        attention=compute.attention,
        memory_bound=compute.memory_bound + accumulated,
        recompute=Passes(input_grad=repeated),
        launch=compute.launch,
        tensor=tensor_passes,
        context=context_passes,
        expert=expert_passes,
    )
    return _Component(time, elements, experts, free, fp8_layer_mean(job, columns, kind))


def _end(work: Workload, inside: TensorTraffic, compute: LayerTime, is_head: bool) -> _Component:
    """Embedding or head: one collective of the residual stream each way when tp cuts the vocabulary."""
    job, columns = work.job, work.columns
    one = np.where(inside.with_sequence, inside.gather.time_s, 0.5 * inside.reduce.time_s)
    matrices = [weights.vocabulary(job.model)] if is_head else weights.embedding(job.model)
    elements = states.on_tp_rank(matrices, job.model, columns)
    if is_head and job.model.tied_embeddings:
        elements = NOTHING  # gathered with the embedding, which on the last stage of a pipeline is its copy
    accumulated = _weight_passes(work, elements)
    time = ComponentTime(
        matmul=compute.matmul,
        memory_bound=compute.memory_bound + accumulated,
        launch=compute.launch,
        tensor=Passes(one, one).scaled(1 + job.model.mtp_depth),
    )
    return _Component(time, elements, NOTHING, compute.total, NOTHING)


def _weight_passes(work: Workload, elements: Array) -> Passes:
    """Casts of weights forward, sums of their gradients backward."""
    job, columns, machine = work.job, work.columns, work.machine
    cast = operators.autocast_s(job, columns, machine, elements)
    return Passes(cast, weight_grad=operators.accumulate_s(job, columns, machine, elements))


def _zero(work: Workload, component: _Component) -> Passes:
    """Exposed gathers and scatters of one piece in one micro-batch.

    They hide behind the piece's own work (standing for its neighbour's), as far as no other transfer already hides there:
    counted twice, slower attention would make a faster step.
    """
    job, columns, machine = work.job, work.columns, work.machine
    moved = communication.ZeroTraffic(work, component.elements, component.experts, component.in_fp8)
    free = component.window
    gathers = columns.zero == 3
    again = gathers & (columns.keep_gathered == 0)
    gathered = np.where(gathers, moved.gather_s, 0.0)
    forward = exposed(gathered, job.framework.overlap * free.forward, machine.efficiency)
    transfers = np.where(again, moved.gather_s, 0.0) + np.where(columns.zero >= 2, moved.scatter_s, 0.0)
    window = job.framework.overlap * (free.input_grad + free.weight_grad)
    backward = exposed(transfers, window, machine.efficiency)
    return Passes(forward, backward)


# ------------------------------------------------------------------------------------------------------------ end of the step


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


def end_of_step(work: Workload, share: RankShare, totals: ComponentTimes[Passes]) -> EndOfStep:
    job, columns, machine = work.job, work.columns, work.machine
    one_microbatch = totals.on(share)
    params = states.on_rank(job.model, columns, share)
    backward, forward = one_microbatch.input_grad + one_microbatch.weight_grad, one_microbatch.forward
    reduce, expert_reduce = communication.data_traffic(work, params)
    sharded = communication.ZeroTraffic(work, params.trunk, params.experts)
    trained = trained_fraction(job)
    reduced = trained * gradient_bytes(job) * params.total / columns.shards
    replicas = transfer(machine, "data", "all_reduce", reduced, work.places.replica)
    level = columns.zero
    # ZeRO-2 and 3 scattered their gradients with each micro-batch; HSDP's replicas still have to meet once a step.
    after_backward = (level == 1) & (job.framework.accumulation == "after-backward")
    whole = (level == 0) | after_backward
    reduction = np.where(whole, reduce.time_s + expert_reduce.time_s, np.where(level == 1, sharded.scatter_s, 0.0))
    reduction = reduction + np.where(level >= 1, replicas.time_s, 0.0)
    hidden = np.where(after_backward, 0.0, job.framework.overlap)
    wait = communication.data_exposed_s(work, hidden * reduction, backward, share.layers) + (1 - hidden) * reduction
    # The stepped parameters are gathered layer by layer, just ahead of the next step's first forward.
    gathered = np.where((level == 1) | (level == 2), trained * sharded.gather_s, 0.0)
    wait = wait + exposed(gathered, job.framework.overlap * forward, machine.efficiency)
    optimizer, offload = _optimizer(work, params, forward, backward)
    if OPTIMIZERS[job.optimizer].matrices is not None:
        spent = muon.time(work, share)
        optimizer = optimizer + spent.compute_s + spent.exposed_s
    offload = offload + _activation_offload_s(work, share, forward, backward)
    if host.one_queue(job, columns, machine):
        head = totals.head.scaled(share.head)
        late = wait * (1 - 1 / np.maximum(share.layers, 1))  # of all layers but the last
        starts = host.kernel_starts_s(job, columns, share)
        optimizer = optimizer + starts[2]
        layers = one_microbatch - head + Passes(starts[0], starts[1])
        idle = host.idle_s(job, columns, machine, share, layers, head, optimizer, late)
        return EndOfStep(np.asarray(wait), optimizer, offload, idle + columns.gas * (starts[0] + starts[1]), 0.0)
    if machine.efficiency.synchronous:
        optimizer = optimizer + host.weights_launch_s(job.model, machine, share.layers)
    elif job.framework.fused_blocks:
        optimizer = np.maximum(optimizer, host.weights_launch_s(job.model, machine, share.layers))
    return EndOfStep(np.asarray(wait), optimizer, offload, np.zeros(len(columns)), machine.efficiency.step_overhead_s)


def _activation_offload_s(work: Workload, share: RankShare, forward: Array, backward: Array) -> Array:
    """What layers save goes to the host beside forward and returns beside backward, in each micro-batch."""
    job, columns, machine = work.job, work.columns, work.machine
    saved = np.asarray(sum(count * activations.layer(job, columns, kind).total for kind, count, _ in share.each()))
    transfer_s = saved / (machine.gpu.pcie_bandwidth_gb_s * 1e9 * machine.efficiency.host_link)
    waited = exposed(transfer_s, forward, machine.efficiency) + exposed(transfer_s, backward, machine.efficiency)
    return np.where(columns.is_("offload", "activations"), columns.gas * waited, 0.0)


def _optimizer(work: Workload, params: states.RankParameters, forward: Array, backward: Array) -> tuple[Array, Array]:
    """Reading and writing every state once, and the gradient once more for its norm; or doing so on the host."""
    job, columns, machine = work.job, work.columns, work.machine
    expert_shards = np.maximum(1, columns.shards * columns.tp / columns.expert_cut / columns.ep)
    held = np.where(columns.zero >= 1, params.trunk / columns.shards + params.experts / expert_shards, params.total)
    own = trained_fraction(job) * held
    b, g = compute_bytes(job), stepped_gradient_bytes(job, columns)
    on_gpu = machine.stream_s(own * optimizer_bytes(job, columns)) * job.framework.optimizer_passes
    norm = machine.stream_s(own * g)
    host_link = machine.gpu.pcie_bandwidth_gb_s * 1e9 * machine.efficiency.host_link
    adam = own * machine.cluster.gpus_per_node / (machine.efficiency.host_adam_gparams_s * 1e9)
    on_host = own * (g + b) / host_link + adam
    # Offloaded parameters cross the host link before every forward and backward.
    fetch = held * b / host_link
    fetched = exposed(fetch, forward, machine.efficiency) + exposed(fetch, backward, machine.efficiency)
    away = columns.offloads_states
    offload = np.where(away, on_host, 0.0) + np.where(columns.is_("offload", "parameters"), columns.gas * fetched, 0.0)
    return np.where(away, norm, on_gpu), np.asarray(offload)
