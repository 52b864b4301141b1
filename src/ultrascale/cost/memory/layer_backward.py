"""Backward of one layer, as tables of tensors with the events between which they are live.

Every allocation of our own engine was traced operator by operator (`exact_memory_trace`, docs/rehearse.md); other engines are
counted in estimate.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum, auto

import numpy as np

from ultrascale.cost.columns import Array, where
from ultrascale.cost.flops import DELTA_CHUNK, MAMBA_SEGMENT
from ultrascale.cost.memory import states
from ultrascale.cost.memory.activations import LayerActivations, expert_rows, linear_attention, recurrent_output
from ultrascale.cost.memory.chunk import (
    AlikeLayers,
    ChunkMemory,
    MemoryPoint,
    TensorLifetime,
    activation,
    buffer,
    fullest,
    walk,
)
from ultrascale.cost.memory.states import FP32, compute_bytes, gradient_bytes, uses_fused_blocks
from ultrascale.specs.blocks import LayerKind, LinearAttention
from ultrascale.specs.job import Job


class LayerEvent(IntEnum):
    """Backward of one layer: of a fused block, of its input gradients alone, of a compiled block, or operator by operator."""

    FUSED_GATE = 0
    FUSED_DOWN_WEIGHT = auto()
    FUSED_NORM = auto()
    FUSED_UP_WEIGHTS = auto()
    INPUT_GRADS_GATE = auto()
    INPUT_GRADS_NORM = auto()
    INPUT_GRADS_OUT = auto()
    INPUT_GRADS_ATTENTION = auto()
    COMPILED = auto()
    COMBINE = auto()
    DOWN_MATMUL = auto()
    GATE = auto()
    EXPERT_ROWS = auto()
    UP_MATMUL = auto()
    INPUT_SUM = auto()
    GATE_MATMUL = auto()
    MLP_NORM = auto()
    ATTENTION = auto()
    ATTENTION_NORM = auto()
    REDUCE_SCATTER = auto()
    END = auto()


class LayerSegment(IntEnum):
    """Parts of a layer's backward, within which nothing beside the layer is allocated or freed."""

    MLP = 0
    ATTENTION = auto()
    REDUCE_SCATTER = auto()
    END = auto()


_SEGMENT_STARTS = (LayerEvent.FUSED_GATE, LayerEvent.ATTENTION, LayerEvent.REDUCE_SCATTER, LayerEvent.END)  # where each begins


# Events at which tensors that a layer saved are freed: in a whole backward, and in a split one, which keeps matmul inputs for
# the weight gradients. What is not named here is freed when the layer's backward ends.
_FREED: dict[str, tuple[LayerEvent, LayerEvent]] = {
    "expert output": (LayerEvent.DOWN_MATMUL, LayerEvent.DOWN_MATMUL),
    "mlp activation": (LayerEvent.GATE, LayerEvent.END),
    "expert activation": (LayerEvent.GATE, LayerEvent.END),
    "mlp matmuls": (LayerEvent.EXPERT_ROWS, LayerEvent.EXPERT_ROWS),
    "expert matmuls": (LayerEvent.EXPERT_ROWS, LayerEvent.EXPERT_ROWS),
    "mlp input": (LayerEvent.MLP_NORM, LayerEvent.END),
    "expert input": (LayerEvent.MLP_NORM, LayerEvent.END),
    "router": (LayerEvent.ATTENTION, LayerEvent.END),
    "shared expert": (LayerEvent.ATTENTION, LayerEvent.END),
    "shared output": (LayerEvent.ATTENTION, LayerEvent.END),
    "mlp norm": (LayerEvent.ATTENTION, LayerEvent.ATTENTION),
}


def layer_backward(chunk: ChunkMemory, gradients: Array, split: bool) -> MemoryPoint:
    """The peak of the chunk's layers in backward, on top of what is in flight; `split`: of the input gradients alone."""
    rows = len(chunk.columns)
    deferring = chunk.columns.split_backward & split & (chunk.job.adapter_rank is None)
    found = nothing = MemoryPoint.nothing(rows)
    for alike in chunk.layers:
        happens = _layer_events(chunk, alike.kind, deferring)
        wide, *narrow = (
            walk(_layer_tensors(chunk, alike, deferring, in_fp8), LayerEvent.END, rows, deferring).peaks_of_segments(
                _SEGMENT_STARTS, happens
            )
            for in_fp8 in ((False, True) if chunk.job.precision == "fp8" else (False,))
        )
        for done in _layers_done(chunk, alike):
            parts = where(chunk.is_fp8_layer(done), narrow[0], wide) if narrow else wide
            beside = walk(_beside_layer(chunk, alike, gradients, done, deferring), LayerSegment.END, rows)
            there = (alike.count > 0) & chunk.is_next(alike, done)
            found = fullest(found, where(there, (parts + beside).peak(), nothing))
    return found


def _layers_done(chunk: ChunkMemory, alike: AlikeLayers) -> list[Array]:
    """Layers of the chunk whose backward is over when one of these may peak: when it is the first of its kind in backward, the
    second, the last but one, or the last.

    Where parameters are freed with all that a layer saved, no later than the second.
    """
    own = alike.count
    most = np.minimum(np.where(chunk.frees_gathered & ~chunk.columns.split_backward, 1, own), own - 1)
    numbers = [np.maximum(0, np.minimum(number, most)) for number in (0, 1, own - 2, own - 1)]
    found = [chunk.when_next(alike, number) for number in numbers]
    return list({done.tobytes(): done for done in found}.values())  # chunks of few layers: two alike


def _layer_events(chunk: ChunkMemory, kind: LayerKind, split: Array) -> dict[int, Array | bool]:
    """In which rows an event happens, for those that do not in all."""
    job, columns, event, moe = chunk.job, chunk.columns, LayerEvent, kind.has_experts
    mixes, has_mlp = kind.mixer != "none", kind.mlp != "none"
    fused = uses_fused_blocks(job, columns) & kind.is_dense
    whole = states.compiled(job, columns) | fused
    eager, rmsnorm = ~whole, job.model.norm == "rmsnorm"
    return {
        **dict.fromkeys(range(event.FUSED_GATE, event.INPUT_GRADS_GATE), fused & ~split),
        **dict.fromkeys(range(event.INPUT_GRADS_GATE, event.COMPILED), fused & split),
        event.COMPILED: whole & ~fused,
        event.COMBINE: eager & moe,
        event.DOWN_MATMUL: eager & has_mlp,
        event.GATE: eager & has_mlp,
        event.EXPERT_ROWS: eager & moe,
        event.UP_MATMUL: eager & has_mlp,
        event.INPUT_SUM: eager & (columns.tp > 1) & (kind.mlp == "dense"),
        event.GATE_MATMUL: eager & job.model.gated & has_mlp,
        event.MLP_NORM: eager & rmsnorm & has_mlp,
        event.ATTENTION: eager & mixes,
        event.ATTENTION_NORM: eager & split & rmsnorm & mixes,
        event.REDUCE_SCATTER: chunk.holds_fresh_gradients & ~split,
    }


def _layer_tensors(chunk: ChunkMemory, alike: AlikeLayers, split: Array, in_fp8: bool) -> Iterator[TensorLifetime]:
    """`in_fp8`: of a fused block."""
    layer, kind, moe = alike.saved, alike.kind, alike.moe
    if chunk.job.framework.fused_blocks:
        yield activation("saved by a compiled block", layer.whole, LayerEvent.COMPILED, LayerEvent.COMBINE)
        gradients = _compiled_linear_gradients(chunk, layer) if kind.mixer == "linear" else layer.gradients
        yield activation("gradients in a compiled block", gradients, LayerEvent.COMPILED, LayerEvent.COMBINE)
        if kind.is_dense and in_fp8:
            yield from _fused_fp8_layer(chunk, layer)
            yield from _fused_fp8_layer_input_grads(chunk, layer)
        elif kind.is_dense:
            yield from _fused_layer(chunk, layer)
            yield from _fused_layer_input_grads(chunk, layer)
    yield from _saved(chunk, layer, moe)
    yield activation("residual gradient", chunk.residual, LayerEvent.COMBINE, LayerEvent.END)
    if kind.mlp != "none":
        yield from _mlp_backward(chunk, layer, moe)
        yield from _mlp_weight_gradients(chunk, moe, split)
    yield from _norm_and_attention_backward(chunk, kind, split)
    yield from _layer_reduce_scatter(chunk, alike)


def _fused_layer(chunk: ChunkMemory, layer: LayerActivations) -> Iterator[TensorLifetime]:
    """A fused block's MLP is one autograd function: its inputs are live until it returns, its weight gradients are returned
    together. Nothing is recomputed; GEMMs of weights that ZeRO gathered one by one copy them together.
    """
    event, residual, wide = LayerEvent, chunk.residual, layer.modules["mlp activation"]
    weight, end = chunk.mlp_weight_gradient[False], event.INPUT_GRADS_GATE
    again = layer.modules["mlp matmuls"] - layer.kept["mlp matmuls"]
    yield activation("saved for backward", layer.fused - again, event.FUSED_GATE, end)
    yield activation("outputs of gate and up, recomputed", again, event.FUSED_GATE, event.FUSED_DOWN_WEIGHT)
    yield activation("residual gradient", residual, event.FUSED_GATE, end)
    yield activation("gradients of gate and up", 2 * wide, event.FUSED_GATE, end)
    yield activation("gradient of the activation", wide, event.FUSED_GATE, event.FUSED_DOWN_WEIGHT)
    yield activation("activation, computed again", wide, event.FUSED_GATE, event.FUSED_NORM)
    yield activation("gradient of the norm's output", residual, event.FUSED_NORM, end)
    yield activation("norm's output, computed again", residual, event.FUSED_NORM, end)
    yield activation("gradient of the norm's input", residual, event.FUSED_NORM, event.FUSED_UP_WEIGHTS)
    # Where tp cuts the block: gathered for GEMMs, and what they yield until it is scattered.
    yield activation("gathered gradient", chunk.gathered_sequence, event.FUSED_GATE, event.FUSED_NORM)
    being_gathered = np.where(chunk.columns.tp > 1, residual, 0.0)
    yield activation("norm's output, computed before it is gathered", being_gathered, event.FUSED_GATE, event.FUSED_NORM)
    yield activation("gathered output of the norm", chunk.gathered_sequence, event.FUSED_GATE, end)
    yield activation("input gradient to scatter", chunk.gathered_sequence, event.FUSED_NORM, end)
    yield buffer("weight gradient of down", weight, event.FUSED_DOWN_WEIGHT, end)
    copies = np.where(chunk.holds_fresh_gradients & ~chunk.gathers_joined, 2 * weight, 0.0)
    yield buffer("gate and up weights, copied together", copies, event.FUSED_NORM, event.FUSED_UP_WEIGHTS)
    yield buffer("weight gradients of gate and up", 2 * weight, event.FUSED_UP_WEIGHTS, end)


def _fused_layer_input_grads(chunk: ChunkMemory, layer: LayerActivations) -> Iterator[TensorLifetime]:
    """The same where weight gradients are deferred: their operands stay, sequences in slices as backward had them."""
    event, residual, wide, gathered = LayerEvent, chunk.residual, layer.modules["mlp activation"], chunk.gathered_sequence
    gate, norm, out, attention, end = (LayerEvent(number) for number in range(event.INPUT_GRADS_GATE, event.COMBINE))
    by_mlp = layer.modules["mlp matmuls"] + layer.modules["mlp norm"]
    yield activation("saved for the MLP's backward", by_mlp, gate, attention)
    yield activation("saved for attention's backward", layer.fused - by_mlp, gate, end)
    yield activation("output gradient of the MLP", residual, gate, end)
    yield activation("activation, computed again", wide, gate, end)
    yield activation("gradients of gate and up", 2 * wide, gate, end)
    yield activation("gradient of the activation", wide, gate, norm)
    yield activation("gathered output gradient", gathered, gate, norm)
    yield activation("gradient of the norm's output", residual + gathered, norm, out)
    normed = np.where(gathered > 0, 0.0, 2 * residual)
    yield activation("norm's output and gradient of its input", normed, norm, out)
    yield activation("norm's output and gradient of its input", 2 * residual, out, end)
    yield activation("gathered output gradient of attention", gathered, out, attention)
    yield activation("gradient of attention's output", layer.modules["attention output"], out, attention)
    yield activation("gradients of output, q, k, v", _attention_gradients(chunk, LayerKind()), attention, end)
    # Freed before the input gradient is scattered, or the norm's backward allocates.
    after = np.where(gathered > 0, residual, normed)
    copied = chunk.sharded & ~chunk.gathers_joined
    copies = np.where(copied, np.maximum(0.0, 2 * chunk.mlp_weight_gradient[False] - after), 0.0)
    yield buffer("gate and up weights, copied together", copies, norm, out)


def _fused_fp8_layer(chunk: ChunkMemory, layer: LayerActivations) -> Iterator[TensorLifetime]:
    """As `_fused_layer`, of a block in fp8: operands of GEMMs are cast, those of weight gradients transposed. Rows that are
    gathered are transposed when all are there.
    """
    event, residual, wide, b = LayerEvent, chunk.residual, layer.modules["mlp activation"], compute_bytes(chunk.job)
    weight, end, gathered = chunk.mlp_weight_gradient[False], event.INPUT_GRADS_GATE, chunk.gathered_sequence
    cut = chunk.columns.tp > 1
    whole = np.where(cut, chunk.full_sequence, 0.0)
    again = layer.modules["mlp matmuls"] - layer.kept["mlp matmuls"]
    yield activation("saved for backward", layer.fused - again, event.FUSED_GATE, end)
    yield activation("outputs of gate and up, recomputed", again, event.FUSED_GATE, event.FUSED_DOWN_WEIGHT)
    yield activation("residual gradient", residual, event.FUSED_GATE, end)
    yield activation("gradients of gate and up", 2 * wide / b, event.FUSED_GATE, event.FUSED_UP_WEIGHTS)
    yield activation("gradients of gate and up, transposed", 2 * wide / b, event.FUSED_GATE, end)
    yield activation("gradient of the activation", wide, event.FUSED_GATE, event.FUSED_DOWN_WEIGHT)
    yield activation("activation, computed again", wide / b, event.FUSED_GATE, event.FUSED_NORM)
    yield activation("output gradient", np.where(cut, whole, residual) / b, event.FUSED_GATE, event.FUSED_NORM)
    yield activation("output gradient, transposed", whole / b, event.FUSED_DOWN_WEIGHT, event.FUSED_NORM)
    slice_ = np.where(gathered > 0, residual / b, 0.0)
    yield activation("norm's output, being gathered", slice_, event.FUSED_GATE, event.FUSED_UP_WEIGHTS)
    yield activation("output of the norm", whole / b, event.FUSED_GATE, end)
    yield activation("input gradient to scatter", gathered, event.FUSED_NORM, end)
    yield activation("gradient of the norm's output", residual, event.FUSED_NORM, end)
    yield activation("norm's output, transposed", np.where(cut, 0.0, residual / b), event.FUSED_UP_WEIGHTS, end)
    yield buffer("weight gradient of down", weight, event.FUSED_DOWN_WEIGHT, end)
    yield from _fp8_gate_up(chunk, gathered + residual, event.FUSED_NORM, event.FUSED_UP_WEIGHTS)
    yield buffer("weight gradients of gate and up", 2 * weight, event.FUSED_UP_WEIGHTS, end)


def _fp8_gate_up(chunk: ChunkMemory, after: Array, start: LayerEvent, end: LayerEvent) -> Iterator[TensorLifetime]:
    """The weights of gate and up, cast and transposed, and where ZeRO gathered them one by one their joint copy, freed before
    what comes `after` is allocated; in ZeRO-3 they were gathered in fp8.
    """
    matrix, b = chunk.mlp_weight_gradient[False], compute_bytes(chunk.job)
    yield buffer("gate and up weights, transposed", 2 * matrix / b, start, end)
    copies = 2 * matrix / np.where(chunk.columns.zero == 3, b, 1)
    yield buffer(
        "gate and up weights, copied together", np.where(chunk.sharded, np.maximum(0.0, copies - after), 0.0), start, end
    )


def _fused_fp8_layer_input_grads(chunk: ChunkMemory, layer: LayerActivations) -> Iterator[TensorLifetime]:
    """The same where weight gradients are deferred: their operands stay in fp8."""
    event, residual, wide, gathered = LayerEvent, chunk.residual, layer.modules["mlp activation"], chunk.gathered_sequence
    gate, norm, out, attention, end = (LayerEvent(number) for number in range(event.INPUT_GRADS_GATE, event.COMBINE))
    b, attended = compute_bytes(chunk.job), layer.modules["attention output"]
    by_mlp = layer.modules["mlp matmuls"] + layer.modules["mlp norm"]
    yield activation("saved for the MLP's backward", by_mlp, gate, attention)
    yield activation("saved for attention's backward", layer.fused - by_mlp, gate, end)
    yield activation("output gradient of the MLP", residual, gate, attention)
    yield activation("output gradient of the MLP, in fp8", residual / b, gate, end)
    yield activation("activation, computed again", wide / b, gate, end)
    yield activation("gradients of gate and up", 2 * wide / b, gate, out)
    yield activation("gradients of gate and up, transposed", 2 * wide / b, gate, end)
    yield activation("gradient of the activation", wide, gate, norm)
    cut = chunk.columns.tp > 1
    yield activation("norm's output, computed early", np.where(cut, residual / b, 0.0), gate, out)
    yield activation("gradient of the norm's output", residual + gathered, norm, out)
    yield activation("norm's output", residual / b, out, end)
    yield activation("gradient of the norm's input", residual, out, end)
    yield activation("output gradient of attention, in fp8", residual / b, out, end)
    yield activation("the same, gathered or transposed", np.where(cut, gathered, residual) / b, out, attention)
    yield activation("gradient of attention's output", attended, out, attention)
    yield activation("attention's output, transposed", attended / b, out, end)
    yield activation("gradients of output, q, k, v", _attention_gradients(chunk, LayerKind()), attention, end)
    yield from _fp8_gate_up(chunk, residual + gathered, norm, out)


def _saved(chunk: ChunkMemory, layer: LayerActivations, moe: bool) -> Iterator[TensorLifetime]:
    """Tensors saved for backward, recomputed ones included."""
    event = LayerEvent
    for name, size in layer.modules.items():
        freed, freed_if_split = _FREED.get(name, (event.REDUCE_SCATTER, event.END))
        if moe and name == "mlp input":  # the router's copy serves no matmul whose weight gradient is deferred
            yield activation("router input in fp32", chunk.router_input, event.COMBINE, freed)
            size = size - chunk.router_input
        yield activation(name, size, event.COMBINE, freed, freed_if_split)


def _mlp_backward(chunk: ChunkMemory, layer: LayerActivations, moe: bool) -> Iterator[TensorLifetime]:
    """Gradients of activations. A gate writes its activation once more. Matmuls of one input add to its gradient in turns."""
    event, gated = LayerEvent, chunk.job.model.gated
    wide = layer.modules["expert activation" if moe else "mlp activation"]
    rows = layer.modules["expert input"] if moe else chunk.full_sequence
    gathered = chunk.gathered_sequence
    if moe:
        out = expert_rows(chunk.job, chunk.columns)
        kept = event.DOWN_MATMUL if chunk.routed_only(moe) else event.END  # for the weights of a shared expert
        yield activation("gathered output gradient", gathered, event.COMBINE, event.DOWN_MATMUL, kept)
        if "expert output" in layer.modules:
            yield activation("gradient of weighted expert output", out, event.COMBINE, event.DOWN_MATMUL)
        yield activation("gradient of expert output", out, event.COMBINE, event.GATE, event.END)
        yield activation("input gradients of each expert", rows, event.EXPERT_ROWS, event.UP_MATMUL)
    else:
        yield activation("gathered output gradient", gathered, event.DOWN_MATMUL, event.GATE, event.END)
        yield activation("gathered input", gathered, event.UP_MATMUL, event.MLP_NORM, event.UP_MATMUL)
    yield activation("gradient of the activation", wide, event.DOWN_MATMUL, event.EXPERT_ROWS)
    yield activation("gradient of up", wide, event.GATE, event.GATE_MATMUL, event.END)
    yield activation("input gradient", rows, event.EXPERT_ROWS, event.MLP_NORM)
    yield activation("scattered input gradient", chunk.residual, event.INPUT_SUM, event.GATE_MATMUL)
    if gated:
        yield activation("activation, computed again", wide, event.GATE, event.EXPERT_ROWS)
        yield activation("gradient of gate", wide, event.GATE, event.MLP_NORM, event.END)
        yield activation("input gradient through up", rows, event.EXPERT_ROWS, event.INPUT_SUM)
        yield activation("input gradient through gate", rows, event.GATE_MATMUL, event.MLP_NORM)


def _mlp_weight_gradients(chunk: ChunkMemory, moe: bool, split: Array) -> Iterator[TensorLifetime]:
    """Fresh weight gradients, which FSDP holds until its group's backward ends, and views of experts until the last is there.

    Experts' are stacked from those of each.
    """
    event, gated = LayerEvent, chunk.job.model.gated
    fresh = np.where(split, 0.0, chunk.mlp_weight_gradient[moe])
    kept = np.where(chunk.holds_fresh_gradients | (moe and chunk.uses_expert_views), fresh, 0.0)
    own_group = moe & (chunk.columns.ep > 1)  # experts that ep cuts are an FSDP group, whose backward ends with them
    until_end = np.where(chunk.holds_fresh_gradients & ~own_group, fresh, 0.0)
    stacked = (2 if moe else 1) * fresh
    in_block = np.where(chunk.holds_fresh_gradients, (2 + gated) * fresh, 0.0)
    yield buffer("MLP's weight gradients, of a compiled block", in_block, event.COMPILED, event.COMBINE)
    yield buffer("weight gradient of down", stacked, event.DOWN_MATMUL, event.GATE)
    yield buffer("weight gradient of down, held", kept, event.GATE, event.MLP_NORM)
    yield buffer("weight gradient of up", fresh, event.UP_MATMUL, event.GATE_MATMUL)
    yield buffer("weight gradient of up, held", kept, event.GATE_MATMUL, event.MLP_NORM)
    if gated:
        yield buffer("weight gradient of gate, with up's", fresh, event.INPUT_SUM, event.GATE_MATMUL)
        yield buffer("weight gradient of gate", stacked, event.GATE_MATMUL, event.MLP_NORM)
    yield buffer("MLP's weight gradients, held", (2 + gated) * until_end, event.MLP_NORM, event.ATTENTION_NORM)


def _norm_and_attention_backward(chunk: ChunkMemory, kind: LayerKind, split: Array) -> Iterator[TensorLifetime]:
    event, residual = LayerEvent, chunk.residual
    workspace = chunk.norm_workspace(residual)
    for norm, end in ((event.MLP_NORM, event.ATTENTION), (event.ATTENTION_NORM, event.REDUCE_SCATTER)):
        yield activation("gradient of the norm's output", residual, norm, end)
        yield activation("norm in fp32", workspace, norm, end)
    if kind.mixer == "none":
        return
    of_mixer = {"linear": _delta_rule_gradients, "mamba": _state_space_gradients}
    gradients = _attention_gradients(chunk, kind) if kind.mixer == "attention" else of_mixer[kind.mixer](chunk)
    yield activation("gradients of output, q, k, v", gradients, event.ATTENTION, event.ATTENTION_NORM)
    if kind.mixer != "attention":  # freed by then, but for the deferred weight gradient of the last GEMM
        operands = recurrent_output(chunk.job, chunk.columns, kind) + chunk.gathered_sequence
        yield activation("operands of the output's GEMM", np.where(split, operands, 0.0), event.ATTENTION, event.ATTENTION_NORM)
    # Deferred weight gradients keep what the last matmuls of attention and MLP were given: gathered, or the residual's
    # gradient as it was then. Attention's takes the place of the MLP norm's input.
    of_attention = np.where(split, chunk.gathered_sequence, 0.0)
    yield activation("gathered output gradient of attention", of_attention, event.ATTENTION_NORM, event.END)
    keeps = kind.mlp != "none" and not chunk.routed_only(kind.has_experts)
    of_mlp = np.where(split & (chunk.columns.sequence_cut == 1) & keeps, residual, 0.0)
    yield activation("output gradient of the MLP", of_mlp, event.ATTENTION, event.END)


def _attention_gradients(chunk: ChunkMemory, kind: LayerKind) -> Array:
    """Gradients of the output, of queries, and of keys and values as the kernel writes them: one for every head of queries, and
    where heads share keys it reads copies of these. All-gathered keys and values are live beside gradients as long.
    """
    model, columns, b = chunk.job.model, chunk.columns, compute_bytes(chunk.job)
    tokens = columns.tokens(chunk.job.seq)
    query = b * tokens * model.q_dim / columns.tp
    key = b * tokens * model.kv_dim / np.minimum(columns.tp, model.kv_heads)
    copies = np.where(query > key, 2 * query, 0.0)

    def ring(query_share: float) -> Array:
        """One block of keys and values with the queries that see it: dq is summed in fp32; dk and dv of the rank's own keys and
        the sums for others are live, and while blocks are exchanged each one sent and received.
        """
        blocks = 2 * (2 + 2 * (columns.cp > 2) + (columns.cp > 3))  # own gradients, keys at work; sums twice; next keys
        return np.asarray((1 + FP32 / b + 2 + query_share) * query + copies + (blocks + (copies > 0)) * key)

    plain = (4 + model.attention_gate) * query + copies
    by_variant = {
        "allgather": np.maximum(2 * query + 4 * key + 4 * columns.cp * key, plain + 2 * columns.cp * key),
        "ring": ring(1.0),
        "zigzag": ring(0.5),
        "ulysses": 5 * query + np.where(query > key * columns.key_copies(model.kv_heads), 2 * query, 0.0),
    }
    found = plain
    for variant, size in by_variant.items():
        found = np.where((columns.cp > 1) & columns.is_("context_parallel", variant), size, found)
    # The norm of queries is computed in fp32 when the kernel's own gradients are freed.
    return np.maximum(found, chunk.norm_workspace(query)) if kind.norms_heads else found


def _compiled_linear_gradients(chunk: ChunkMemory, layer: LayerActivations) -> Array:
    """The most of a compiled block with linear attention: the MLP's, or those of the delta rule and the residual, when what
    the MLP saved is freed.
    """
    kept = {"attention norm", "qkv input", *linear_attention(chunk.job, chunk.columns)}
    freed = sum(size for name, size in layer.modules.items() if name not in kept)
    return np.maximum(layer.gradients, 2 * chunk.residual + _delta_rule_gradients(chunk) - freed)


def _delta_rule_gradients(chunk: ChunkMemory) -> Array:
    """A gated delta rule's backward beyond what its layer saved: the gate's gradient is there, and what the output's norm and
    gate saved is freed.
    """
    model, tokens = chunk.job.model, chunk.columns.tokens(chunk.job.seq)
    linear = model.linear_attention
    assert linear is not None
    chunks = -(-chunk.job.seq // DELTA_CHUNK)
    padded = tokens / chunk.job.seq * chunks * DELTA_CHUNK
    rule = _delta_rule_by_kernels if states.delta_rule_kernels(chunk.job) else _plain_delta_rule
    found = linear.value_heads / chunk.columns.tp * rule(chunk.job, linear, tokens, padded)
    saved = linear_attention(chunk.job, chunk.columns)["gated output"]
    return np.asarray(found + compute_bytes(chunk.job) * tokens * linear.value_dim / chunk.columns.tp - saved)


def _delta_rule_by_kernels(job: Job, linear: LinearAttention, tokens: Array, padded: Array) -> Array:
    """For each head of values: of all chunks values and their gradients, the inverted system, states and their gradients; and
    gradients of the output and of all inputs.
    """
    keys, values = linear.key_head_dim, linear.value_head_dim
    of_chunks = 2 * values + DELTA_CHUNK + 2 * keys * values / DELTA_CHUNK
    return np.asarray(compute_bytes(job) * (padded * of_chunks + tokens * 2 * (keys + values)) + tokens * 2 * FP32)


def _plain_delta_rule(job: Job, linear: LinearAttention, tokens: Array, padded: Array) -> Array:
    """For each head of values: the rule again in fp32, with scores and states of all chunks of tokens."""
    keys, values = linear.key_head_dim, linear.value_head_dim
    chunks, state = -(-job.seq // DELTA_CHUNK), keys * values / DELTA_CHUNK
    # All states and the outputs of chunks, before backward's first chunk; or gradients of scores, in its last.
    last = DELTA_CHUNK + (8 * keys + 2 * values + 4 * state) / chunks
    each = 8 * keys + 4 * values + 6 * DELTA_CHUNK + 6 + np.maximum(values + state * (1 + 1 / chunks), last)
    if compute_bytes(job) < FP32:  # copies of what was saved
        each = each + 2 * keys * linear.key_heads / linear.value_heads + values / 2
    return np.asarray(FP32 * padded * each)


def _state_space_gradients(chunk: ChunkMemory) -> Array:
    """A Mamba-2 layer's backward beyond what it saved, where it is fullest: in the norm of its output, in the state space or in
    the convolution of x. The first two compute a segment of each sequence again, in fp32.
    """
    job, columns, mamba = chunk.job, chunk.columns, chunk.job.model.mamba
    assert mamba is not None
    b, tokens, wide = compute_bytes(job), columns.tokens(job.seq), mamba.inner_dim
    length = -(-min(job.seq, MAMBA_SEGMENT) // DELTA_CHUNK) * DELTA_CHUNK
    # Of a part of the heads, where cp exchanges slices of the sequence for these; the norm has its slice.
    segment, states = columns.mbs * length / columns.cp, wide * mamba.state_dim / columns.cp
    normed = columns.mbs * np.minimum(length, job.seq / columns.cp)
    # Scores and their decays, values nine times, states before chunks twice, and the first; B, C and their scores by group.
    each = mamba.heads * (2 * DELTA_CHUNK + 5) + 9 * wide + mamba.groups * DELTA_CHUNK + 2 * mamba.group_dim
    in_fp32 = segment * each + 2 * columns.mbs * length * states / DELTA_CHUNK
    in_fp32 = in_fp32 + columns.mbs * states * (1 + (job.seq > MAMBA_SEGMENT))
    narrow = b * wide * (b < FP32)
    # In the place of what was saved: of the output before and after norm and gate, of the gate, of the state space's inputs.
    norm = b * tokens * 2 * wide + (9 * FP32 * wide + narrow) * normed
    space = b * tokens * (2 * mamba.group_dim + mamba.heads) + FP32 * in_fp32 + narrow * segment
    convolution = b * tokens * (6 - 2) * wide
    return np.asarray(np.maximum(np.maximum(norm, space), convolution) / columns.tp)


def _layer_reduce_scatter(chunk: ChunkMemory, alike: AlikeLayers) -> Iterator[TensorLifetime]:
    """The end of a layer's backward: fresh gradients, copied into the reduce-scatter's input unless that has their format and
    comes after deferred weight gradients; before these they are cast one by one.
    """
    at, b, g, block = LayerEvent.REDUCE_SCATTER, compute_bytes(chunk.job), gradient_bytes(chunk.job), alike.block
    late = chunk.columns.split_backward
    copied, reduced = chunk.reduce_scatters & ~(late & (g == b)), chunk.reduce_scatters & ~late
    output = np.where(reduced, chunk.reduce_scatter_output(block), 0.0)
    fresh = np.where(copied & late & (not alike.moe), chunk.mlp_weight_gradient[False], chunk.trained * b * block)
    yield buffer("layer's weight gradients", fresh, at, LayerEvent.END)
    yield buffer("reduce-scatter input", np.where(copied, chunk.trained * g * block, 0.0), at, LayerEvent.END)
    yield buffer("reduce-scatter output", output, at, LayerEvent.END)


def _beside_layer(
    chunk: ChunkMemory, alike: AlikeLayers, gradients: Array, done: Array, split: Array
) -> Iterator[TensorLifetime]:
    """Live beside a layer in backward when `done` layers of the chunk are through.

    What is in flight was counted for the whole chunk, this layer included: saved tensors of layers that are done are freed.
    A split backward frees none, but only layers that are done have what is counted for their deferred weight gradients.
    """
    start, scatter, end = LayerSegment.MLP, LayerSegment.REDUCE_SCATTER, LayerSegment.END
    params, columns, late = chunk.rank_params, chunk.columns, chunk.columns.split_backward
    b, g, block = compute_bytes(chunk.job), gradient_bytes(chunk.job), alike.block
    layers = chunk.own.total - chunk.own.ends
    share_done = chunk.elements_done(done) / np.maximum(1, layers)
    freed = np.where(split, chunk.deferred - chunk.deferred_when_done(done), chunk.saved_when_done(done))
    yield activation("of what is in flight: this layer, and those done", -alike.saved.total - freed, start, end)
    # The gradient that the chunk received is the residual's own until attention of the first layer in backward; a deferred
    # weight gradient of that layer may need it anyway, unless it was gathered.
    gathered = (columns.sequence_cut > 1) & ~uses_fused_blocks(chunk.job, columns)
    received = (chunk.share.head == 0) & (~split | gathered | chunk.routed_only(alike.moe))
    yield activation("received gradient", np.where(received & (done > 0), chunk.residual, 0.0), start, end)
    separate = np.where(received & (done == 0) & (alike.kind.sublayers == 2), chunk.residual, 0.0)
    yield activation("received gradient", separate, LayerSegment.ATTENTION, end)
    # This layer and the one prefetched. Its parameters are freed before its gradients are reduce-scattered.
    next_one = chunk.tied_group + chunk.block_of_next(done + 1) + (alike.elements - block)
    both = chunk.unsharded(next_one + block, chunk.fp8_prefetched(done))
    prefetched = chunk.unsharded(next_one, chunk.fp8_prefetched(done, this_layer=False))
    yield buffer("unsharded parameters", both, start, scatter)
    yield buffer("unsharded parameters", prefetched, scatter, end)
    through = share_done * layers + np.where(late, 0.0, chunk.head_group)
    frees = chunk.frees_gathered
    yield TensorLifetime("freed parameters of layers done", "parameters", np.where(frees, -b * through, 0.0), start, end)
    yield TensorLifetime("freed parameters of this layer", "parameters", np.where(frees, -b * block, 0.0), scatter, end)
    yield buffer("gradient sent to the previous stage", chunk.sent_gradient, start, end)
    yield buffer("head's weight gradient", chunk.head_gradient, start, end)
    # FSDP frees the input of a reduce-scatter when the next one begins.
    others = chunk.rank_reduce_scatter_inputs - chunk.reduce_scatter_input
    yield buffer("reduce-scatter inputs of other chunks", others, start, end)
    last_layer = np.where(chunk.reduce_scatters, chunk.trained * g * chunk.block_of_next(done - 1), 0.0)
    of_head = np.where(chunk.reduce_scatters, chunk.trained * g * chunk.head_group, 0.0)
    before = np.where(~late & (chunk.head_group > 0), of_head, chunk.reduce_scatter_input)
    last = np.where(late | (done == 0), before, last_layer)
    yield buffer("last reduce-scatter input", last, start, scatter)
    yield buffer("last reduce-scatter input", np.where(late, last, 0.0), scatter, end)
    # A whole backward of a chunk whose others are split reduce-scatters all its gradients at its end, as theirs do.
    all_at_end = late & ~split & chunk.reduce_scatters
    whole = np.where(all_at_end, chunk.trained * g * through, np.where(late, 0.0, chunk.first_gradients(through)))
    yield buffer("gradients of layers done", whole, start, end)
    accumulated = gradients * (share_done * (1 - params.ends / params.total) + chunk.head_group / params.total)
    yield TensorLifetime("gradients", "gradients", np.where(chunk.single_backward, accumulated, gradients), start, end)
