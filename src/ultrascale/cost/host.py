"""A machine whose operators run in the host's own time, one by one, as on a CPU: what a layer of our engine does there.

Nothing is compiled: norms, rotations and gates are the plain operators of ultrascale/model, each of which reads and writes its
tensors and passes through Python and autograd. Their numbers are counted in that code and by what a profiler saw of it
(docs/time.md); what each takes is the cluster's: `kernel_launch_s`, `memory_bandwidth`, `softmax_gscores_s`.
"""

from __future__ import annotations

import numpy as np

from ultrascale.cost.activations import compute_bytes
from ultrascale.cost.columns import Array, LayoutColumns
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.launch import weights_of
from ultrascale.cost.passes import Passes
from ultrascale.specs.job import Job
from ultrascale.specs.model import Model

# Operators of a layer, views too, by the time that they take with hardly a token: so many times an addition of two small
# tensors that autograd follows. Routing, permuting and weighing tokens come on top.
FORWARD, BACKWARD = 230, 300
ROUTING_FORWARD, ROUTING_BACKWARD = 285, 360
# torch.utils.checkpoint hooks every tensor that forward saves, in Python, once more when it comes again and when backward asks.
HOOKS_FORWARD, HOOKS_BACKWARD = 160, 165
# Selective recomputation sees every operator pass through Python, both times.
SEEN_FORWARD, SEEN_BACKWARD = 850, 1125
# The look-up and the angles of positions; the last norm, the head's product and the loss, and the start of backward.
EMBEDDING_FORWARD, EMBEDDING_BACKWARD = 40, 20
HEAD_FORWARD, HEAD_BACKWARD = 70, 70
# A weight's norm, clipping and step.
OF_WEIGHT = 10

# Tensors that are read or written between products, each as wide as it is. A norm: square, mean, twice a product; backward its
# unit once more, the weight's gradient and the input's. A residual's sum; backward two, and the sums of products' gradients.
NORM_FORWARD, NORM_BACKWARD = 7, 19
LAYERNORM_FORWARD, LAYERNORM_BACKWARD = 2, 5
SUM, SUMS_OF_PRODUCTS = 3, 9
# Rotation: half of it negated, joined, two products and their sum; the same backward.
ROTATED = 10
# Keys and values are written out for every head that reads them, in both passes, and their gradients added up.
COPIES_FORWARD, COPIES_BACKWARD = 2, 4
GATED_FORWARD, GATED_BACKWARD = 5, 11
PLAIN_FORWARD, PLAIN_BACKWARD = 2, 3
# Logits: their softmax; backward what the label leaves of it, and the gradient.
LOSS_FORWARD, LOSS_BACKWARD = 2, 5


def launches(columns: LayoutColumns, machine: ClusterRates, moe: bool) -> Passes:
    """Host time of one layer's operators. A full recomputation's second forward is not in it, being a forward."""
    full, selective = columns.is_("recompute", "full"), columns.is_("recompute", "selective")
    forward = FORWARD + ROUTING_FORWARD * moe + np.where(full, HOOKS_FORWARD, np.where(selective, SEEN_FORWARD, 0))
    backward = BACKWARD + ROUTING_BACKWARD * moe + np.where(full, HOOKS_BACKWARD, np.where(selective, SEEN_BACKWARD, 0))
    each = machine.launch_s
    return Passes(each * forward, each * backward, np.zeros(len(columns)))


def embedding_launches(columns: LayoutColumns, machine: ClusterRates) -> Passes:
    return _operators(columns, machine, EMBEDDING_FORWARD, EMBEDDING_BACKWARD)


def head_launches(columns: LayoutColumns, machine: ClusterRates) -> Passes:
    return _operators(columns, machine, HEAD_FORWARD, HEAD_BACKWARD)


def _operators(columns: LayoutColumns, machine: ClusterRates, forward: int, backward: int) -> Passes:
    each = machine.launch_s * machine.efficiency.synchronous * np.ones(len(columns))
    return Passes(each * forward, each * backward, 0 * each)


def of_weights_s(model: Model, machine: ClusterRates, layers: Array) -> Array:
    """Host time of the optimizer's operators for the weights of so many layers."""
    return np.asarray(OF_WEIGHT * machine.launch_s * weights_of(model) * layers)


def elementwise(job: Job, columns: LayoutColumns, machine: ClusterRates, moe: bool) -> Passes:
    """Reading and writing by one layer's operators between the products, moving of tokens left aside."""
    model, tokens = job.model, columns.tokens(job.seq)
    residual: Array = model.hidden / columns.sequence_cut
    turned = (
        (model.q_dim + model.kv_dim) / columns.tp if model.mla is None else 2 * model.heads * model.qk_head_dim / columns.tp
    )
    width = _width(job, columns, moe)
    norm = (NORM_FORWARD, NORM_BACKWARD) if model.norm == "rmsnorm" else (LAYERNORM_FORWARD, LAYERNORM_BACKWARD)
    gate = (GATED_FORWARD, GATED_BACKWARD) if model.gated else (PLAIN_FORWARD, PLAIN_BACKWARD)
    grouped = model.mla is None and model.kv_heads < model.heads
    copies = (COPIES_FORWARD * grouped, COPIES_BACKWARD * grouped)
    rotated = ROTATED * (model.positions == "rotary")
    sums = (2 * SUM, 2 * SUM + SUMS_OF_PRODUCTS)
    forward, backward = (
        (2 * norm[way] + sums[way]) * residual + (rotated + copies[way]) * turned + gate[way] * width for way in (0, 1)
    )
    bytes_ = compute_bytes(job) * tokens
    return Passes(machine.stream_s(bytes_ * forward), machine.stream_s(bytes_ * backward), np.zeros(len(columns)))


def _width(job: Job, columns: LayoutColumns, moe: bool) -> Array:
    model: Model = job.model
    if not moe or model.moe is None:
        return np.asarray(model.ffn / columns.tp)
    shared = (model.moe.shared_expert_ffn or 0) * bool(model.moe.shared_experts)
    rows = model.moe.top_k * columns.busiest(job.cluster.efficiency.expert_imbalance)
    return np.asarray((rows * model.moe.expert_ffn + shared) / columns.tp)


def loss(job: Job, columns: LayoutColumns, machine: ClusterRates) -> Passes:
    """The last norm, and the loss of logits that stand in memory."""
    tokens, logits = columns.tokens(job.seq), job.model.vocab / columns.tp
    residual: Array = job.model.hidden / columns.sequence_cut
    b = compute_bytes(job) * tokens
    forward = machine.stream_s(b * (LOSS_FORWARD * logits + NORM_FORWARD * residual))
    backward = machine.stream_s(b * (LOSS_BACKWARD * logits + NORM_BACKWARD * residual))
    return Passes(forward, backward, np.zeros(len(columns)))
