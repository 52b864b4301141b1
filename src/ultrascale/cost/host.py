"""Host time: kernel launches that a GPU waits for, and operators that run in the host's own time on a CPU.

On a GPU a step's launches go into a queue, which the host fills and the GPU empties. The host goes on while the GPU works: what
it gains at long kernels pays for short ones later. After a synchronisation neither is ahead: our engine reads loss and gradient
norm once a step, before the optimizer; routing reads counts back in every layer; a pipeline's stages wait for each other. On
one GPU our engine replays a step as one CUDA graph if launching takes longer than running.

On a CPU nothing is compiled and nothing is asynchronous: each operator of ultrascale/model reads and writes its tensors and
passes through Python and autograd. The cluster says what each takes: `kernel_launch_s`, `memory_bandwidth`.

All counts are in surfaces/host.yaml, each with its source.
"""

from __future__ import annotations

from functools import cache, reduce
from typing import Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from ultrascale.cost.columns import Array, LayoutColumns, Passes, RankShare
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.memory.states import accumulates_nothing, compute_bytes, eager, uses_fused_blocks
from ultrascale.specs.blocks import LayerKind
from ultrascale.specs.files import package_data
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.model import Model
from ultrascale.specs.weights import layer_weights


class PassCounts(NamedTuple):
    """Operators, kernels or tensors of a forward, a backward and a recomputed forward pass."""

    forward: float
    backward: float
    again: float = 0.0

    @property
    def both(self) -> float:
        return self.forward + self.backward


class _SourcedConstants(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    source: str


class CPUOperators(_SourcedConstants):
    """In units of one small addition."""

    layer: PassCounts
    routing: PassCounts
    full_recompute: PassCounts
    selective_recompute: PassCounts
    embedding: PassCounts
    head: PassCounts
    weight: float


class CPUTensors(_SourcedConstants):
    """Tensors that operators between GEMMs read or write."""

    rmsnorm: PassCounts
    layernorm: PassCounts
    residual: PassCounts
    gemm_gradients: float
    rotary: PassCounts
    kv_copies: PassCounts
    gated: PassCounts
    plain: PassCounts
    loss: PassCounts


class CompiledLayer(_SourcedConstants):
    """Kernels of a compiled layer, forward."""

    kernels: int
    routing: int
    local_tokens_first: int


class LaunchQueue(_SourcedConstants):
    """Launches of our engine on a GPU."""

    layer: PassCounts
    bias: float
    weight: float
    ends: float
    streams_fused: PassCounts
    streams_compiled: PassCounts
    start_s: float
    between_graphs_s: float


class RoutingHost(BaseModel):
    host_s: float
    kernels_per_expert: int


class Routing(_SourcedConstants):
    dropless: RoutingHost
    graphed: RoutingHost
    capacity: RoutingHost
    grouped: RoutingHost


class HostConstants(BaseModel):
    """surfaces/host.yaml."""

    cpu_operators: CPUOperators
    cpu_tensors: CPUTensors
    compiled_layer: CompiledLayer
    launch_queue: LaunchQueue
    routing: Routing


@cache
def constants() -> HostConstants:
    return HostConstants.model_validate(package_data("ultrascale.cost", "surfaces/host.yaml"))


# ------------------------------------------------------------------------------------------------------------------ on a GPU

Quantity = Literal["elementwise", "launch", "launch_sharded", "launch_tensor"]


def relative_to_compiled(job: Job, columns: LayoutColumns, quantity: Quantity) -> Array:
    """Bytes or launches relative to a compiled block: the engine's own, or of plain blocks where ours compiles none."""
    own: float = getattr(job.framework, quantity)
    if not job.framework.fused_blocks:
        return np.asarray(own)
    return np.where(eager(job, columns), getattr(Framework.load("ultrascale-eager"), quantity), own)


def launch_relative_to_bare(job: Job, columns: LayoutColumns) -> Array:
    """Host time of a dense layer's launches over that of as many bare ones, with what cutting the layer adds."""
    sharded = relative_to_compiled(job, columns, "launch_sharded") * (columns.zero == 3) * (columns.shards > 1)
    cut = relative_to_compiled(job, columns, "launch_tensor") * (columns.tp > 1)
    return np.asarray(relative_to_compiled(job, columns, "launch") + sharded + cut)


def collective_calls_s(columns: LayoutColumns, machine: ClusterRates) -> Array:
    """Host time of the tensor-parallel collectives of a dense layer's forward: two sublayers are entered and left."""
    cluster, constants = machine.cluster, machine.efficiency
    inside = constants.link_call_s if cluster.nodes > 1 else 0.0
    spans = columns.tp > max(cluster.gpus_per_node, cluster.link_domain)
    each = np.where(spans, constants.network_call_s, inside)
    return np.where(columns.tp > 1, 4 * columns.tp * each, 0.0)


def layer_launch_s(job: Job, columns: LayoutColumns, machine: ClusterRates, kind: LayerKind) -> Array:
    """Host time to launch one layer's forward in any engine; backward takes twice as long."""
    compiled, routing = constants().compiled_layer, getattr(constants().routing, job.framework.routing)
    share = kind.sublayers / 2  # of a layer of attention and MLP
    kernels = np.full(len(columns), share * compiled.kernels) + (compiled.routing if kind.has_experts else 0)
    if not kind.has_experts or job.model.moe is None:
        each_s = machine.launch_s * launch_relative_to_bare(job, columns)
        return np.asarray(each_s * kernels + share * collective_calls_s(columns, machine))
    launch_s = machine.launch_s * relative_to_compiled(job, columns, "launch")
    per_expert = routing.kernels_per_expert * (2 if job.precision == "fp8" else 1)
    kernels = kernels + per_expert * job.model.moe.experts / columns.ep
    return np.asarray(launch_s * kernels + routing.host_s)


def exposed_launches(busy: Passes, launch_s: Array) -> Passes:
    """The GPU idles where the host needs longer to launch a layer's kernels than the GPU to run them."""
    backward = np.maximum(0.0, 2 * launch_s - busy.input_grad - busy.weight_grad)
    return Passes(np.maximum(0.0, launch_s - busy.forward), backward)


def launches_beyond_communication(launch: Passes, communication: Passes) -> Passes:
    """What is left of a layer's exposed launches when its exposed communication counts as time in which the GPU is busy."""
    backward = communication.input_grad + communication.weight_grad
    return Passes(np.maximum(0.0, launch.forward - communication.forward), np.maximum(0.0, launch.input_grad - backward))


def one_queue(job: Job, columns: LayoutColumns, machine: ClusterRates) -> bool:
    """Whether one queue runs through the whole step; else each layer waits for its own launches. Rows share their pp."""
    asynchronous = job.framework.fused_blocks and not machine.efficiency.synchronous
    return asynchronous and not job.model.moe_layers and bool((columns.pp == 1).all())


def weights_launch_s(model: Model, machine: ClusterRates, layers: Array) -> Array:
    """Host time of one launch for every weight of so many layers: matrices, norms, biases; experts of a layer are stacked.

    On a CPU, of the optimizer's operators.
    """
    operators = constants().cpu_operators if machine.efficiency.synchronous else constants().launch_queue
    return np.asarray(operators.weight * machine.launch_s * weights_of(model) * layers)


def weights_of(model: Model) -> float:
    """Parameters of a layer, a matrix or a vector each, in the mean over layers of one sublayer or Mamba-2."""
    if model.one_sublayer or model.mamba is not None:
        each = sum(count * len(layer_weights(model, kind)) for kind, count in model.layer_kinds.items())
        return each / model.all_layers
    biases = 3 * model.qkv_bias + model.attention_output_bias + 2 * model.mlp_bias + 2 * model.qk_norm
    return 4 + (3 if model.gated else 2) + 2 + biases


def dense_layer_launch_s(
    job: Job, columns: LayoutColumns, machine: ClusterRates, recomputed: Array | float = 1.0
) -> tuple[Array, Array]:
    """Host time to launch one dense layer of our engine, forward and backward; `recomputed`: the part of layers that is."""
    queue, plain = constants().launch_queue, eager(job, columns)
    biases = 3 * job.model.qkv_bias + job.model.attention_output_bias + 2 * job.model.mlp_bias
    again = np.where(columns.is_("recompute", "full"), queue.layer.again * recomputed, 0)
    each = machine.launch_s * launch_relative_to_bare(job, columns)
    calls_s = collective_calls_s(columns, machine)
    forward = each * np.where(plain, constants().compiled_layer.kernels, queue.layer.forward) + calls_s
    backward = each * (queue.layer.backward + queue.bias * biases + again) + 2 * calls_s
    return forward, np.where(plain, 2 * forward, backward)


def pairs_of_sublayers(model: Model, share: RankShare) -> Array:
    """As many layers of attention and MLP as have as many sublayers."""
    return np.asarray(share.layers * model.sublayers / (2 * model.layers))


def idle_s(
    job: Job,
    columns: LayoutColumns,
    machine: ClusterRates,
    share: RankShare,
    layers: Passes,
    head: Passes,
    optimizer_s: Array,
    late_s: Array,
) -> Array:
    """Seconds that the GPU idles between two synchronisations: optimizer, reading, then micro-batches of layers and head.

    A kernel is launched before it runs: a step takes at least the host's time up to the end of any stretch and the device's
    from there on. The longest of these is the step, and what it takes beyond the device's own time is idle. `late_s` of the
    gradients' reduction go on while the host launches the rest of backward.
    """
    queue, gas = constants().launch_queue, columns.gas
    each_layer = dense_layer_launch_s(job, columns, machine, share.recomputed_fraction)
    forward, backward = (launch_s * pairs_of_sublayers(job.model, share) for launch_s in each_layer)
    ends = queue.ends * machine.launch_s * job.framework.launch
    weights = weights_launch_s(job.model, machine, share.layers)
    backward = backward + np.where(accumulates_nothing(job, columns), 0.0, weights)
    optimizer = weights - optimizer_s
    begun = optimizer + machine.efficiency.step_overhead_s
    first = 0.5 * ends + forward - layers.forward
    whole = ends + forward + backward - layers.total - head.total
    waits = (
        np.zeros(len(columns)),
        optimizer,
        begun,
        begun + first,
        begun + (gas - 1) * whole + first,
        begun + gas * whole + weights - late_s,
    )
    launched = np.asarray(reduce(np.maximum, waits))
    replayed = graphable(job, columns) & (layers.total + head.total < 2 * (ends + forward + backward))
    return np.where(replayed, np.minimum(launched, queue.between_graphs_s), launched)


def graphable(job: Job, columns: LayoutColumns) -> Array:
    """Where a step of a dense model can be replayed as one CUDA graph (kernels/selection.py says why not elsewhere)."""
    by_ddp = columns.is_("data_parallel", "ddp") & (columns.data_ranks > 1) & (columns.zero == 0)
    captured = job.framework.cuda_graphs and job.precision != "fp16" and job.optimizer == "adamw"
    return np.asarray(captured & (columns.pp == 1) & columns.is_("offload", "none") & ~by_ddp)


def kernel_starts_s(job: Job, columns: LayoutColumns, share: RankShare) -> tuple[Array, Array, Array]:
    """What memory-bound kernels take beyond their bytes: in forward and backward of a micro-batch, and in the optimizer."""
    queue, full = constants().launch_queue, columns.is_("recompute", "full")
    fused, compiled = queue.streams_fused, queue.streams_compiled
    in_fused_blocks = uses_fused_blocks(job, columns)
    forward = np.where(in_fused_blocks, fused.forward, compiled.forward)
    backward = np.where(in_fused_blocks, fused.backward, compiled.backward) + np.where(
        full, compiled.again * share.recomputed_fraction, 0
    )
    weights = weights_of(job.model) * share.layers
    sums = np.where(accumulates_nothing(job, columns), 0, weights)
    start = queue.start_s
    layers = pairs_of_sublayers(job.model, share)
    return start * forward * layers, start * (backward * layers + sums), start * 2 * weights


def layer_starts_s(job: Job, columns: LayoutColumns) -> Passes:
    """The same for a layer of any engine: as many more kernels as its operators move more bytes than compiled ones."""
    queue, kernels = constants().launch_queue, relative_to_compiled(job, columns, "elementwise")
    return Passes(*(queue.start_s * kernels * each for each in queue.streams_compiled[:2]))


# ------------------------------------------------------------------------------------------------------------------ on a CPU


def cpu_layer(columns: LayoutColumns, machine: ClusterRates, kind: LayerKind) -> Passes:
    """Host time of one layer's operators. A full recomputation's second forward is not in it, being a forward."""
    counts = constants().cpu_operators
    full, selective = columns.is_("recompute", "full"), columns.is_("recompute", "selective")
    forward, backward = (
        kind.sublayers / 2 * counts.layer[i]
        + counts.routing[i] * kind.has_experts
        + np.where(full, counts.full_recompute[i], np.where(selective, counts.selective_recompute[i], 0))
        for i in (0, 1)
    )
    return Passes(machine.launch_s * forward, machine.launch_s * backward)


def cpu_end(columns: LayoutColumns, machine: ClusterRates, counts: PassCounts) -> Passes:
    """Host time of the embedding's or the head's operators; none where launches are asynchronous."""
    each = machine.launch_s * machine.efficiency.synchronous * np.ones(len(columns))
    return Passes(each * counts.forward, each * counts.backward)


def cpu_elementwise(job: Job, columns: LayoutColumns, machine: ClusterRates, kind: LayerKind) -> Passes:
    """Reading and writing by one layer's operators between the GEMMs, moving of tokens left aside."""
    model, tokens, counts = job.model, columns.tokens(job.seq), constants().cpu_tensors
    residual: Array = model.hidden / columns.sequence_cut
    heads = (model.q_dim + model.kv_dim) if model.mla is None else 2 * model.heads * model.qk_head_dim
    width, has_attention = mlp_width(job, columns, kind), kind.mixer == "attention"
    norm = counts.rmsnorm if model.norm == "rmsnorm" else counts.layernorm
    gate = counts.gated if model.gated else counts.plain
    grouped = model.mla is None and model.kv_heads < model.heads
    rotary = model.positions == "rotary"
    gradients = (0.0, counts.gemm_gradients)
    forward, backward = (
        (kind.sublayers * norm[i] + kind.sublayers * counts.residual[i] + kind.sublayers / 2 * gradients[i]) * residual
        + has_attention * (counts.rotary[i] * rotary + counts.kv_copies[i] * grouped) * heads / columns.tp
        + gate[i] * width
        for i in (0, 1)
    )
    bytes_ = compute_bytes(job) * tokens
    return Passes(machine.stream_s(bytes_ * forward), machine.stream_s(bytes_ * backward))


def mlp_width(job: Job, columns: LayoutColumns, kind: LayerKind) -> Array:
    """Of the MLP's activations on the busiest rank, over all experts that a token visits."""
    model = job.model
    if not kind.has_experts or model.moe is None:
        return np.asarray((kind.mlp == "dense") * model.ffn / columns.tp)
    rows = model.moe.top_k * columns.busiest(job.cluster.efficiency.expert_imbalance)
    return np.asarray((rows * model.moe.expert_ffn + model.moe.shared_expert_ffn) / columns.tp)


def cpu_loss(job: Job, columns: LayoutColumns, machine: ClusterRates) -> Passes:
    """The last norm, and the loss of logits that stand in memory."""
    counts, logits = constants().cpu_tensors, job.model.vocab / columns.tp
    residual: Array = job.model.hidden / columns.sequence_cut
    b = compute_bytes(job) * columns.tokens(job.seq)
    forward, backward = (machine.stream_s(b * (counts.loss[i] * logits + counts.rmsnorm[i] * residual)) for i in (0, 1))
    return Passes(forward, backward)
