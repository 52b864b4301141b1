"""Time of the pieces a model is cut into: a dense layer, a MoE layer, the embedding, the head; by cause, per micro-batch.

A rank's time is a sum of its pieces, so every layout, rank and chunk is a linear combination of these four.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import reduce

import numpy as np

from ultrascale.cost import context, expert, operators, tensor, zero
from ultrascale.cost.columns import Array, LayoutColumns
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.memory import parameters
from ultrascale.cost.memory.states import fp8_layer_mean, lean
from ultrascale.cost.mesh import GroupPlacement, mesh
from ultrascale.cost.operators import LayerTime
from ultrascale.cost.overlap import exposed
from ultrascale.cost.passes import Passes
from ultrascale.cost.stages import RankShare
from ultrascale.cost.tensor import TensorTraffic
from ultrascale.specs.job import Job

# Everything a piece's time depends on; schedule, virtual stages, pp and accumulation only repeat and order the pieces.
DEPENDS_ON = (
    "tp",
    "cp",
    "dp",
    "ep",
    "mbs",
    "zero",
    "zero_shards",
    "keep_gathered",
    "sequence_parallel",
    "context_parallel",
    "recompute",
)


def depends_on(job: Job) -> tuple[str, ...]:
    """One micro-batch alone may leave its gradients as they were made, which two cannot; a table's rows share their pp.

    Where a clock follows the work, it follows how often the optimizer steps.
    """
    of_gas = job.framework.fused_blocks or job.cluster.efficiency.boost > 1
    return (*DEPENDS_ON, "gas") if of_gas else DEPENDS_ON


@dataclass(frozen=True)
class ComponentTime:
    """Seconds by cause; communication only as far as it is exposed."""

    matmul: Passes
    attention: Passes
    memory_bound: Passes
    recompute: Passes
    launch: Passes
    tensor: Passes
    context: Passes
    expert: Passes
    zero: Passes

    @property
    def total(self) -> Passes:
        parts: list[Passes] = [getattr(self, f.name) for f in fields(ComponentTime)]
        return reduce(Passes.__add__, parts)

    def combined(self, other: ComponentTime, join: Callable[[Passes, Passes], Passes]) -> ComponentTime:
        return ComponentTime(*(join(getattr(self, f.name), getattr(other, f.name)) for f in fields(ComponentTime)))

    def scaled(self, factor: Array) -> ComponentTime:
        return ComponentTime(*(getattr(self, f.name).scaled(factor) for f in fields(ComponentTime)))

    def take(self, rows: Array) -> ComponentTime:
        return ComponentTime(*(getattr(self, f.name).take(rows) for f in fields(ComponentTime)))

    def __add__(self, other: ComponentTime) -> ComponentTime:
        return self.combined(other, Passes.__add__)


@dataclass(frozen=True)
class ComponentTimes:
    dense: ComponentTime
    moe: ComponentTime | None
    embedding: ComponentTime
    head: ComponentTime

    def on(self, share: RankShare) -> ComponentTime:
        """A rank's (or a chunk's) time for one micro-batch."""
        total = self.dense.scaled(share.dense_layers) + self.embedding.scaled(share.embedding)
        total = total + self.head.scaled(share.head)
        return total if self.moe is None else total + self.moe.scaled(share.moe_layers)

    def take(self, rows: Array) -> ComponentTimes:
        moe = None if self.moe is None else self.moe.take(rows)
        return ComponentTimes(self.dense.take(rows), moe, self.embedding.take(rows), self.head.take(rows))

    def totals(self) -> ComponentTotals:
        moe = self.moe.total if self.moe is not None else None
        return ComponentTotals(self.dense.total, moe, self.embedding.total, self.head.total)


@dataclass(frozen=True)
class ComponentTotals:
    """The same with causes added up: what the search needs."""

    dense: Passes
    moe: Passes | None
    embedding: Passes
    head: Passes

    def take(self, rows: Array) -> ComponentTotals:
        moe = None if self.moe is None else self.moe.take(rows)
        return ComponentTotals(self.dense.take(rows), moe, self.embedding.take(rows), self.head.take(rows))

    def on(self, share: RankShare) -> Passes:
        total = self.dense.scaled(share.dense_layers) + self.embedding.scaled(share.embedding)
        total = total + self.head.scaled(share.head)
        return total if self.moe is None else total + self.moe.scaled(share.moe_layers)


def pieces(job: Job, columns: LayoutColumns, machine: ClusterRates) -> ComponentTimes:
    places = mesh(columns, machine.cluster)
    inside = tensor.traffic(job, columns, places, machine)
    clock = operators.clock(job, columns, machine)
    experts = operators.layer(job, columns, machine, True, clock) if job.model.moe_layers else None
    return ComponentTimes(
        _layer(job, columns, machine, places, inside, operators.layer(job, columns, machine, False, clock), moe=False),
        None if experts is None else _layer(job, columns, machine, places, inside, experts, moe=True),
        _end(job, columns, machine, places, inside, operators.embedding(job, columns, machine), is_head=False),
        _end(job, columns, machine, places, inside, operators.head(job, columns, machine, clock), is_head=True),
    )


def _layer(
    job: Job,
    columns: LayoutColumns,
    machine: ClusterRates,
    places: GroupPlacement,
    inside: TensorTraffic,
    compute: LayerTime,
    moe: bool,
) -> ComponentTime:
    nothing = np.zeros(len(columns))
    around = context.traffic(job, columns, places, machine, compute.attention)
    again = exposed(inside.gather_again_s, compute.matmul.input_grad, machine.efficiency)
    # Cut into tp pieces, an exchange hides behind products; backward's share the window with the second gather.
    pieced = tensor.pieced_s(job, columns, inside, moe)
    behind_again = np.minimum(inside.gather_again_s, compute.matmul.input_grad)
    rest = compute.matmul.input_grad + compute.matmul.weight_grad - behind_again
    tensor_passes = Passes(
        inside.layer_s - pieced + exposed(pieced, compute.matmul.forward, machine.efficiency),
        inside.layer_s - pieced + exposed(pieced, rest, machine.efficiency) + again,
        nothing,
    )
    context_passes = Passes(around.forward_s, around.backward_s, nothing)
    expert_passes = behind_rows = Passes(nothing, nothing, nothing)
    if moe:
        exchange = expert.traffic(job, columns, places, machine)
        behind_rows = Passes(nothing + exchange.behind_forward_s, nothing + exchange.behind_backward_s, nothing)
        expert_passes = Passes(exchange.forward_s, exchange.backward_s, nothing)
    forward = compute.total.forward + tensor_passes.forward + context_passes.forward + expert_passes.forward
    last = nothing
    if job.framework.exact_memory_trace and not moe:
        # torch.utils.checkpoint stops at the last tensor that backward asks for; a layer's output is not among them.
        down = [product for product in compute.matmuls if product.name == "mlp down"]
        last = operators.matmul_passes(machine, down).forward
    repeated = np.where(columns.is_("recompute", "full"), forward - last, nothing)
    cheap = compute.memory_bound.forward - compute.never_repeated if job.attention == "flash" else compute.attention.forward
    if job.framework.selective == "half":
        cheap = cheap + 0.5 * compute.matmul.forward
    elif job.model.mla is not None and job.attention == "flash":
        up = [product for product in compute.matmuls if product.name in ("q up", "kv up")]
        cheap = (nothing if job.framework.selective == "latents" else cheap) + operators.matmul_passes(machine, up).forward
    repeated = np.where(columns.is_("recompute", "selective") & ~lean(job, columns), cheap, repeated)
    layer = parameters.per_layer(job.model, columns)
    elements, experts = (layer.moe, layer.experts) if moe else (layer.dense, nothing)
    behind_forward = around.behind_forward_s + np.minimum(pieced, compute.matmul.forward) + behind_rows.forward
    behind_backward = around.behind_backward_s + behind_again + np.minimum(pieced, rest) + behind_rows.input_grad
    free = compute.total + Passes(-behind_forward, repeated - behind_backward, nothing)
    sharded = _zero(job, columns, machine, places, elements, experts, free, fp8_layer_mean(job, columns, moe))
    accumulated = Passes(nothing, nothing, operators.accumulate_s(job, columns, machine, elements + experts))
    return ComponentTime(
        _full(compute.matmul, nothing),
        _full(compute.attention, nothing),
        compute.memory_bound + accumulated,
        Passes(nothing, repeated, nothing),
        _full(compute.launch, nothing),
        tensor_passes,
        context_passes,
        expert_passes,
        sharded,
    )


def _end(
    job: Job,
    columns: LayoutColumns,
    machine: ClusterRates,
    places: GroupPlacement,
    inside: TensorTraffic,
    compute: LayerTime,
    is_head: bool,
) -> ComponentTime:
    """Embedding or head: one exchange of the residual stream each way when tp cuts the vocabulary."""
    nothing = np.zeros(len(columns))
    one = np.where(inside.with_sequence, inside.gather.time_s, 0.5 * inside.reduce.time_s)
    weights = [parameters.vocabulary(job.model)] if is_head else parameters.embedding(job.model)
    elements = parameters.on_tp_rank(weights, job.model, columns)
    if is_head and job.model.tied_embeddings:
        elements = nothing  # gathered with the embedding, which on the last stage of a pipeline is its copy
    none = Passes(nothing, nothing, nothing)
    return ComponentTime(
        _full(compute.matmul, nothing),
        none,
        compute.memory_bound + Passes(nothing, nothing, operators.accumulate_s(job, columns, machine, elements)),
        none,
        _full(compute.launch, nothing),
        Passes(one, one, nothing),
        none,
        none,
        _zero(job, columns, machine, places, elements, nothing, compute.total, nothing),
    )


def _full(passes: Passes, like: Array) -> Passes:
    """Arrays of the table's length, whatever they were computed from."""
    return Passes(passes.forward + like, passes.input_grad + like, passes.weight_grad + like)


def _zero(
    job: Job,
    columns: LayoutColumns,
    machine: ClusterRates,
    places: GroupPlacement,
    elements: Array,
    experts: Array,
    free: Passes,
    narrow: Array,
) -> Passes:
    """Exposed gathers and scatters of one piece in one micro-batch.

    They hide behind the piece's own work (standing for its neighbour's), as far as no other transfer already hides there:
    counted twice, slower attention would make a faster step.
    """
    moved = zero.traffic(job, columns, places, machine, elements, experts, narrow)
    gathers = columns.zero == 3
    again = gathers & (columns.keep_gathered == 0)
    gathered = np.where(gathers, moved.gather_s, 0.0)
    forward = exposed(gathered, job.framework.overlap * free.forward, machine.efficiency)
    transfers = np.where(again, moved.gather_s, 0.0) + np.where(columns.zero >= 2, moved.scatter_s, 0.0)
    window = job.framework.overlap * (free.input_grad + free.weight_grad)
    backward = exposed(transfers, window, machine.efficiency)
    return Passes(forward, backward, np.zeros(len(columns)))
