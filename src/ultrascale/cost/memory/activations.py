"""Tensors saved for backward: bytes per layer and module under each recomputation policy, and those of head and loss.

The count is by tensor, for fused norms and gated activations and flash attention (docs/memory.md lists every one). For a GPT
layer with dropout and plain attention it adds up to s·b·h·(34 + 5·a·s/h), equation 1 of Korthikanti 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ultrascale.cost.columns import Array, LayoutColumns, where
from ultrascale.cost.flops import MAMBA_SEGMENT, reach
from ultrascale.cost.memory.states import (
    ALTERNATE,
    FP32,
    compute_bytes,
    eager,
    operand_bytes,
    routes_slices,
    selective_policy,
    uncut,
    uses_fused_blocks,
)
from ultrascale.specs.blocks import LayerKind
from ultrascale.specs.job import Job

CHUNKS = 8  # a chunked loss computes its logits in so many
CHUNKED_GRADIENTS = ("chunked-gradients", "chunked-gradients-fp32")
LOSS_CHUNK = 4096  # tokens at a time of a loss that computes its gradients in forward (kernels/loss.py)


@dataclass(frozen=True)
class LayerActivations:
    """Bytes saved by one layer for one micro-batch on one rank, by module."""

    kept: dict[str, Array]
    """under the recomputation policy"""
    modules: dict[str, Array]
    """without any policy"""
    gradients: Array
    """gradients of activations that are live at the peak of the layer's backward"""

    @cached_property
    def total(self) -> Array:
        return np.asarray(sum(self.kept.values()))

    @cached_property
    def whole(self) -> Array:
        return np.asarray(sum(self.modules.values()))

    @property
    def recomputed(self) -> Array:
        """Live again while the layer is in backward."""
        return np.asarray(self.whole - self.total)

    @cached_property
    def fused(self) -> Array:
        """What a fused block saves, or has again when it is recomputed."""
        return np.asarray(sum(size for name, size in self.modules.items() if name not in _CHEAP))


def layer(job: Job, columns: LayoutColumns, kind: LayerKind, recomputes: bool = True) -> LayerActivations:
    """`recomputes` False: a layer that recomputes nothing though others do."""
    model, b = job.model, compute_bytes(job)
    tokens = columns.tokens(job.seq)
    residual = b * tokens * model.hidden / columns.sequence_cut  # one residual-wide tensor, cut only by sequence parallelism
    operand = residual / b * operand_bytes(job)
    if job.framework.gathered_inputs:
        operand = operand * columns.sequence_cut
    normed = norm_bytes(job) / b * residual
    modules: dict[str, Array] = {}
    if kind.mixer != "none":
        modules |= {"attention norm": normed, "qkv input": operand, **mixer(job, columns, kind)}
    if kind.predicts:  # the embedding of a later token, its norm and the hidden state's as one, and what the last norm reads
        modules |= {"prediction inputs": normed + 2 * operand, "prediction output": normed}
    if kind.mlp != "none":
        mlp = _moe(job, columns, tokens, b, residual) if kind.has_experts else _mlp(job, columns, tokens, b, operand)
        modules |= {"mlp norm": normed, **mlp}
    if model.parallel_residual != "none":  # both branches read one tensor, and after one norm its output too
        modules["mlp norm"] = 0.0 * normed
        modules["mlp input"] = modules["mlp input"] * (model.parallel_residual != "one_norm")
    if model.norm_placement == "both":
        modules["outputs before norms"] = 2 * normed
    if job.adapter_rank is not None:
        _leave_out_frozen(job, modules, kind, tokens / columns.tp)
    if job.dropout:
        modules["dropout masks"] = kind.sublayers * residual / b
    experts = model.moe.top_k * model.moe.expert_ffn + model.moe.shared_expert_ffn if model.moe else 0
    inner = {"attention": model.q_dim, "mamba": model.mamba.inner_dim if model.mamba else 0}
    width = {"dense": model.ffn, "moe": experts, "none": inner.get(kind.mixer, 0)}[kind.mlp]
    # An unsplit backward frees what it has used. A split one keeps inputs and output gradients for the weight gradients, so
    # that the gradients of the activation and of both residual branches come on top.
    split = columns.split_backward
    wide = (2 if model.gated else 1) + np.where(split, 1, 0)
    gradients = b * tokens * wide * width / columns.tp + np.where(split, 4, 2) * residual
    kept = _apply_policy(job, columns, modules, residual, recomputes)
    return LayerActivations(kept, modules, np.asarray(gradients))


def _leave_out_frozen(job: Job, modules: dict[str, Array], kind: LayerKind, tokens: Array) -> None:
    """A frozen GEMM needs no input in backward; adapters need theirs, flash attention its output."""
    nothing, everywhere = 0.0 * tokens, job.adapter_targets == "all"
    if kind.has_experts:
        modules |= {"expert input": nothing, "expert activation": nothing}
        shared = bool(job.model.moe and job.model.moe.shared_experts)
        copies = compute_bytes(job) * shared * everywhere  # none of the router's
        modules["mlp input"] = copies * modules["mlp input"] / (FP32 + compute_bytes(job) * shared)
        if shared and not everywhere:
            modules["shared expert"] = modules["shared expert"] * (2 / 3 if job.model.gated else 1 / 2)
    elif not everywhere:
        down_input = operand_bytes(job) * tokens * job.model.ffn
        modules |= {"mlp input": nothing, "mlp activation": modules["mlp activation"] - down_input}


def norm_bytes(job: Job) -> int:
    """Kept by a norm for each element of its input."""
    return compute_bytes(job) + (FP32 if job.framework.norm == "fp32" else 0)


def mixer(job: Job, columns: LayoutColumns, kind: LayerKind) -> dict[str, Array]:
    """Saved by attention, or by what is in its place, beside its norm and input."""
    if kind.mixer == "attention":
        return attention(job, columns, kind)
    return {"linear": linear_attention, "mamba": mamba}[kind.mixer](job, columns)


def mamba(job: Job, columns: LayoutColumns) -> dict[str, Array]:
    """Outputs of the projections; of the convolutions, as the state space takes them, and its states between segments; its
    output before and after norm and gate.
    """
    mamba, each = job.model.mamba, compute_bytes(job) * columns.tokens(job.seq) / columns.tp
    assert mamba is not None
    states = FP32 * columns.mbs * mamba.inner_dim * mamba.state_dim / columns.tp
    return {
        "mamba input": each * (2 * mamba.inner_dim + 2 * mamba.group_dim + mamba.heads),
        "mamba": each * (mamba.inner_dim + 2 * mamba.group_dim) + ((job.seq - 1) // MAMBA_SEGMENT) * states,
        "gated output": each * 2 * mamba.inner_dim,
    }


def linear_attention(job: Job, columns: LayoutColumns) -> dict[str, Array]:
    """Outputs of the projections, less those of steps and decays; what the delta rule and its output's norm and gate save."""
    linear, b, tokens = job.model.linear_attention, compute_bytes(job), columns.tokens(job.seq) / columns.tp
    assert linear is not None
    convolved = 2 * linear.key_dim + linear.value_dim
    rates = 4 * FP32 * linear.value_heads  # before and after softplus, and as the rule takes them
    return {
        "linear attention input": b * tokens * (convolved + linear.value_dim),
        "linear attention": tokens * (b * convolved + rates),
        "gated output": tokens * (4 * b * linear.value_dim + FP32 * linear.value_heads),
    }


def recurrent_inputs(job: Job, columns: LayoutColumns, kind: LayerKind) -> Array:
    """Of what linear attention or Mamba-2 saves, all but the outputs of projections and the input of the last GEMM."""
    saved = mixer(job, columns, kind)
    inside = sum(size for name, size in saved.items() if not name.endswith(" input"))
    return np.asarray(inside - recurrent_output(job, columns, kind))


def recurrent_output(job: Job, columns: LayoutColumns, kind: LayerKind) -> Array:
    """Input of the last GEMM of linear attention or Mamba-2."""
    linear, mamba = job.model.linear_attention, job.model.mamba
    width = linear.value_dim if kind.mixer == "linear" and linear else mamba.inner_dim if mamba else 0
    return np.asarray(compute_bytes(job) * columns.tokens(job.seq) * width / columns.tp)


def attention(job: Job, columns: LayoutColumns, kind: LayerKind) -> dict[str, Array]:
    model, tp, tokens, b = job.model, columns.tp, columns.tokens(job.seq), compute_bytes(job)
    kv_cut = np.minimum(tp, model.kv_heads)
    switches = (columns.cp > 1) & columns.is_("context_parallel", "ulysses")
    if model.mla is None:
        qkv = b * tokens * (model.q_dim / tp + 2 * model.kv_dim / kv_cut)
    else:
        # Expanded q, k and v per head; our engine pads v.
        v_dim = model.qk_head_dim if job.framework.exact_memory_trace else model.v_head_dim
        qkv = b * tokens * model.heads * (2 * model.qk_head_dim + v_dim) / tp
    output = switched = b * tokens * model.heads * model.v_head_dim / tp
    padded = b * tokens * model.heads * model.qk_head_dim / tp
    if model.mla is not None and job.framework.exact_memory_trace:  # as wide as padded values, and a copy for the next GEMM
        output = np.where(switches, padded, padded + output)
    latents = {} if model.mla is None else _latents(job, columns, b * tokens)
    if np.any(switches):  # the kernel keeps its output by heads, the next matmul by sequence
        latents["switched output"] = np.where(switches, switched, 0.0)
        if model.mla is None:  # fewer kv heads than ranks to spread them over
            copied = 2 * b * tokens * model.kv_dim / kv_cut * (columns.key_copies(model.kv_heads) - 1)
            latents["copies of k, v"] = np.where(switches, copied, 0.0)
    if model.mla is None and job.framework.context in ("ring-compiled", "flex"):  # flex keeps none beside them
        gathered = 2 * b * tokens * model.kv_dim / kv_cut * (columns.cp - (job.framework.context == "flex"))
        latents["gathered k, v"] = np.where(columns.cp > 1, gathered, 0.0)
    if job.framework.context == "ring":  # by heads, for attention's backward, and as the next GEMM takes it
        latents["merged output"] = np.where(columns.cp > 1, output, 0.0)
    if model.attention_gate:  # after its sigmoid, and the output that it has weighed
        latents["attention gate"] = latents["gated attention output"] = b * tokens * model.q_dim / tp
    heads = tokens * (model.q_dim / tp + model.kv_dim / kv_cut)
    if kind.norms_heads and job.framework.keeps_heads_before_norm:
        latents["q, k before norm"] = norm_bytes(job) * heads
    if model.positions == "rotary" and job.framework.unrotated_heads:
        latents["q, k before rotation"] = b * heads
    if operand_bytes(job) != b:
        output = output * (b + operand_bytes(job)) / b  # flash needs its own output as it is, the next matmul the copy
    if job.attention == "flash":
        return {**latents, "q, k, v": qkv, "attention output": output, "log-sum-exp": 4 * tokens * model.heads / tp}
    # Softmax output; with dropout also the mask (1 byte) and the dropped output: 5·a·s² of Korthikanti 2022 at two bytes.
    per_score = b + (1 + b if job.dropout else 0)
    attended = reach(model, job.seq, kind.local)
    return {
        **latents,
        "q, k, v": qkv,
        "attention output": output,
        "attention scores": per_score * tokens * attended * model.heads / tp,
    }


def value_padding(job: Job, columns: LayoutColumns) -> Array:
    model, each = job.model, compute_bytes(job) * columns.tokens(job.seq) * job.model.heads / columns.tp
    switches = (columns.cp > 1) & columns.is_("context_parallel", "ulysses")
    return np.asarray(each * (model.qk_head_dim - model.v_head_dim + np.where(switches, 0, model.qk_head_dim)))


def _latents(job: Job, columns: LayoutColumns, each: Array) -> dict[str, Array]:
    """Inputs of the norms and of the up-projections: slices of the sequence in our engine, whole on every rank in others."""
    mla = job.model.mla
    assert mla is not None
    ranks = (mla.q_lora_rank or 0) + mla.kv_lora_rank
    if not job.framework.exact_memory_trace:
        return {"latents": 2 * each * (ranks + mla.qk_rope_head_dim)}
    each = each / columns.sequence_cut
    return {"latents": each * (ranks + mla.qk_rope_head_dim), "normed latents": each * ranks}


def _mlp(job: Job, columns: LayoutColumns, tokens: Array, b: int, operand: Array) -> dict[str, Array]:
    model = job.model
    wide = tokens * model.ffn / columns.tp
    kept = operand_bytes(job) + (b if model.gated and job.framework.eager_activation else 0)
    return {"mlp input": operand, "mlp matmuls": gate_bytes(job) * (1 + model.gated) * wide, "mlp activation": kept * wide}


def gate_bytes(job: Job) -> int:
    """Bytes of a gate's input as it is saved."""
    return 1 if job.precision == "fp8" and job.framework.fp8_gates else compute_bytes(job)


def _moe(job: Job, columns: LayoutColumns, tokens: Array, b: int, residual: Array) -> dict[str, Array]:
    model, moe = job.model, job.model.moe
    assert moe is not None
    busiest = columns.busiest(job.cluster.efficiency.expert_imbalance)
    routed = tokens * moe.top_k * busiest
    # Experts that tp cuts see the rows of all its ranks, gathered if each sent a slice.
    rows = routed / columns.routed_cut(sliced=False) + job.framework.expert_padding * moe.experts / columns.ep
    wide, operand = rows * moe.expert_ffn / columns.expert_cut, operand_bytes(job)
    sliced = routes_slices(job, columns)
    always = job.framework.sliced_routing == "always"  # Megatron-Core, where routing weighs activations instead of outputs
    slices = np.where(sliced, columns.sequence_cut, 1)
    plain = eager(job, columns)
    # Without slices every tp rank has the whole sequence from the router on; eager, the router keeps its own fp32 copy of it.
    in_fp32 = plain | (job.framework.routing_format == "fp32")
    copies = np.where(in_fp32, FP32 + b * bool(moe.shared_experts or moe.scale_inputs), b)
    cast = {"compute": False, "fp32": job.framework.eager_activation, "fp32-gemm": True}[job.framework.routing_format]
    weighed = 0 if always or moe.scale_inputs else FP32 if cast else b  # routing may weigh activations or inputs instead
    mlp_input = residual if always else copies * tokens * model.hidden / slices
    modules = {
        "mlp input": mlp_input,
        "router": job.framework.router_bytes * tokens * moe.experts / slices,
        "expert input": operand * rows * model.hidden,
        "expert matmuls": gate_bytes(job) * (1 + model.gated) * wide,
        "expert activation": (operand + b * job.framework.eager_activation) * wide,
        "expert output": weighed / b * expert_rows(job, columns),
    }
    if moe.shared_experts:
        shared = b * tokens * moe.shared_expert_ffn / columns.tp
        modules["shared expert"] = (3 if model.gated else 2) * shared
        if moe.shared_gate:  # eager, the gate's gradient asks for what it weighed
            modules["shared output"] = np.where(plain, b * tokens * model.hidden, 0.0)
    return modules


def expert_rows(job: Job, columns: LayoutColumns) -> Array:
    """Outputs of experts as they come home: as many as left, however busy some experts were."""
    assert job.model.moe is not None
    travelling = columns.tokens(job.seq) * job.model.moe.top_k * job.model.hidden
    travelling = travelling / columns.routed_cut(routes_slices(job, columns))
    busiest = np.where(eager(job, columns), 1, columns.busiest(job.cluster.efficiency.expert_imbalance))
    return np.asarray(compute_bytes(job) * travelling * busiest)


# Selective recomputation with flash attention keeps matmuls and computes the cheap operators again.
_MATMULS = {"q, k, v", "mlp matmuls", "expert matmuls", "mlp norm"}
_CHEAP = ("qkv input", "mlp input", "mlp activation", "expert activation")
EXPERTS = ("expert input", "expert matmuls", "expert activation", "expert output")
_DROPPED: dict[str, tuple[str, ...]] = {
    "cheap": _CHEAP,
    "half": _CHEAP,
    **dict.fromkeys(ALTERNATE, (*_CHEAP, *EXPERTS, "mlp norm", "q, k before norm", "merged output")),
    "latents": ("q, k, v",),
    "experts": ("mlp input", "expert activation"),
    "attention": (),  # flash attention's output is the next GEMM's input
    "scores": ("attention scores",),  # Korthikanti 2022
}


def _apply_policy(
    job: Job, columns: LayoutColumns, modules: dict[str, Array], residual: Array, recomputes: bool
) -> dict[str, Array]:
    full, selective = columns.is_("recompute", "full") & recomputes, columns.is_("recompute", "selective") & recomputes
    dropped = _DROPPED[selective_policy(job)]
    exact = job.framework.exact_memory_trace
    if job.model.mla is not None and dropped is _CHEAP:
        # q, k and v are made again from the latents, by two small matmuls; in our engine from their results.
        dropped = (*dropped, "normed latents" if exact else "q, k, v")
    if job.framework.exact_memory_trace and job.attention == "flash":
        # torch.utils.checkpoint sorts tokens by expert again, and sends them if it must; and so with Ulysses' output.
        dropped = (*dropped, "expert input", "switched output", "copies of k, v")
    if job.framework.exact_memory_trace:  # selective recomputation keeps matmuls, which are not normed yet
        dropped = (*dropped, "q, k before norm", "shared output", "gated attention output")
        dropped = (*dropped, "linear attention", "mamba", "gated output")
    if job.framework.context == "flex":
        dropped = (*dropped, "gathered k, v")
    fused = uses_fused_blocks(job, columns)  # compute cheap operators again, whatever the policy
    plain = selective & ~fused
    keeps = {name: ~full & ~(plain & (name in dropped)) & ~(fused & (name in _CHEAP)) for name in modules}
    if "mlp matmuls" in keeps:
        keeps["mlp matmuls"] = keeps["mlp matmuls"] & ~(selective & fused)
    kept = {name: np.where(keeps[name], bytes_, 0.0) for name, bytes_ in modules.items()}
    if job.framework.selective == "half":
        # Every second matmul is computed again; attention's own output is always kept.
        for name in _MATMULS & kept.keys():
            kept[name] = np.where(selective, 0.5 * kept[name], kept[name])
    if job.framework.selective == "alternate-unjoined" and job.model.mla is None and "q, k, v" in kept:
        again = (columns.cp == 1) | (job.framework.context != "ring-compiled")  # else keys are kept
        keys = compute_bytes(job) * columns.tokens(job.seq) * job.model.kv_dim / np.minimum(columns.tp, job.model.kv_heads)
        kept["q, k, v"] = kept["q, k, v"] - np.where(selective & again, keys, 0.0)
    if job.framework.selective in ALTERNATE and "mlp matmuls" in kept:
        kept["mlp matmuls"] = np.where(selective, kept["mlp matmuls"] / (1 + job.model.gated), kept["mlp matmuls"])
        # Results of reduce-scatters are kept too, and operator by operator those of the last GEMM, which nothing needs.
        scattered = np.where(columns.sequence_cut > 1, residual, 0.0)
        unused = (columns.sequence_cut + (columns.sequence_cut > 1)) * residual if job.framework.eager_activation else 0.0
        kept["outputs"] = np.where(selective, scattered + unused, 0.0)
    if job.framework.selective in ALTERNATE and "expert input" in kept:  # results of all-to-alls, which recomputation sorts
        rows = 2 * modules["expert input"]
        kept["rows of all-to-alls"] = np.where(selective & (columns.ep > 1), rows, 0.0)
    if job.framework.exact_memory_trace and "shared expert" in kept and job.attention == "flash":
        # A shared expert's activation is as cheap as the others.
        kept["shared expert"] = kept["shared expert"] * np.where(plain, 2 / 3 if job.model.gated else 1 / 2, 1.0)
    first = "attention norm" if "attention norm" in kept else "mlp norm"
    kept[first] = np.where(full, residual, kept[first])
    if exact and (mla := job.model.mla) is not None and "q, k, v" in kept:
        made = job.model.heads * (job.model.qk_head_dim + mla.qk_nope_head_dim + mla.v_head_dim)
        made_bytes = compute_bytes(job) * columns.tokens(job.seq) * made / columns.tp
        kept["q, k, v"] = np.where(plain, made_bytes, kept["q, k, v"])
        padded = job.model.qk_head_dim / (job.model.qk_head_dim + mla.v_head_dim)
        switches = (columns.cp > 1) & columns.is_("context_parallel", "ulysses")
        kept["attention output"] = kept["attention output"] * np.where(plain & ~switches, padded, 1.0)
    if exact and job.model.moe is not None and job.model.moe.scale_inputs and "expert input" in kept:
        kept["expert output"] = np.where(plain, expert_rows(job, columns), 0.0)
    if exact and "prediction inputs" in kept:  # of three tensors the embedding, which is not computed again
        kept["prediction inputs"] = np.where(plain, modules["prediction output"], kept["prediction inputs"])
    # Outputs of GEMMs: of attention's, and of the MLP's if a norm needs it.
    if exact and job.model.parallel_residual != "none":
        kept["mlp norm"] = np.where(plain, residual, kept["mlp norm"])
    if exact and job.model.norm_placement != "pre":
        kept["outputs before norms"] = np.where(plain, residual, kept.get("outputs before norms", 0.0 * residual))
    return kept


@dataclass(frozen=True)
class HeadActivations:
    """Bytes of final norm, vocabulary-parallel logits and loss for one micro-batch, with a compiled (fused) loss.

    Fused, the softmax stays in registers: the logits are kept in the compute format, its gradient is written in the same, and
    fp32 exists only as two numbers a token. One H200 with torchtitan 0.2.2 shows it: 1B parameters, 32,768 tokens and a
    vocabulary of 128,256 peak at 78.9 GiB, which leaves 18 GiB for logits that are 7.8 GiB in bf16. Where head and loss are one
    compiled graph, the gradient is written over the logits: the same work peaks at 70.8 GiB (benchmarks/gpu).
    """

    saved: Array
    """kept from forward to backward"""
    peak: Array
    """at the start of backward: those and the gradient of the logits"""
    forward: Array
    """the peak of forward, where that was traced"""
    backward: Array
    """when the loss is through and plain operators compute the gradients of head and hidden states; 0 where they are fused"""


def head(job: Job, columns: LayoutColumns) -> HeadActivations:
    one, depth = _next_token_head(job, columns), job.model.mtp_depth
    if not depth:
        return one
    # Losses of further tokens wait for that of the next; what their norms read is counted with their layers.
    norm = norm_bytes(job) * columns.tokens(job.seq) * job.model.hidden / columns.sequence_cut
    waiting = np.asarray(depth * (one.saved - norm))
    backward = np.where(one.backward > 0, one.backward + waiting, 0.0)
    return HeadActivations(one.saved + waiting, one.peak + waiting, one.forward + waiting, backward)


def _next_token_head(job: Job, columns: LayoutColumns) -> HeadActivations:
    tokens, b = columns.tokens(job.seq), compute_bytes(job)
    norm = (norm_bytes(job) + b) * tokens * job.model.hidden / columns.sequence_cut
    statistics = 2 * FP32 * tokens
    logits = tokens * job.model.vocab / columns.tp
    cast = (b if b < FP32 else 0.0) + 2.0 * FP32  # logits, their fp32 copy, its softmax
    cut = (columns.tp > 1) & job.framework.loss_parallel
    # Bytes per logit: saved, at the start of backward, in forward.
    by_loss: dict[str, tuple[Array | float, Array | float, Array | float]] = {
        "overwritten": (b, b, b),
        "fused": (b, 2.0 * b, b),
        # torch's loss over a cut vocabulary is not compiled. Backward turns its softmax into the gradient: forward is fullest.
        "compiled": (np.where(cut, FP32, b), np.where(cut, cast, 2.0 * b), np.where(cut, cast, b)),
        "dtensor": (FP32, np.where(cut, 4.0 * FP32, 3.0 * FP32), cast),
        "log-softmax": (FP32, np.where(cut, cast, 3.0 * FP32), cast),
        "in-place": (FP32, 2.0 * FP32, 2.0 * FP32),
        # Logits that are fp32 already are not cast, and of them only the log-softmax is kept.
        "fp32": (b + 2.0 * FP32, b + 3.0 * FP32, cast) if b < FP32 else (1.0 * FP32, 3.0 * FP32, cast),
        "fp32-softmax": (FP32, 3.0 * FP32, 3.0 * FP32),
        "chunked": (b / CHUNKS, 2.0 * b / CHUNKS, b / CHUNKS),
        "cast": (FP32, cast, cast),
    }
    if job.framework.loss in CHUNKED_GRADIENTS:
        return _head_chunked_gradients(job, columns)
    # Where a loss that comes with its gradients is not used, plain operators are.
    loss = "log-softmax" if job.framework.loss == "at-once" else job.framework.loss
    backward = norm + b * logits + b * tokens * job.model.hidden if loss == "log-softmax" else np.zeros(len(columns))
    each = list(by_loss[loss])
    if not job.framework.loss_parallel:  # whole, and in forward also the parts that are gathered
        saved, peak, forward = (one * columns.tp for one in each)
        each = [saved, peak, np.where(columns.tp > 1, np.maximum(forward, 2 * b * columns.tp + b), forward)]
    held = [np.asarray(norm + statistics + one * logits) for one in each]
    plain = HeadActivations(held[0], held[1], held[2], np.asarray(backward))
    if job.framework.loss != "at-once":
        return plain
    return where(chunked_loss(job, columns), _head_at_once(job, columns, norm + statistics), plain)


def chunked_loss(job: Job, columns: LayoutColumns) -> Array:
    """Rows whose loss comes with its gradients; in fp16 only head and loss that are one compiled graph."""
    fits = job.framework.loss == "at-once"
    return np.asarray(fits & (uncut(columns) | (job.precision != "fp16")))


def loss_chunk(job: Job, columns: LayoutColumns) -> Array:
    """Tokens of a chunk: as many logits on every rank, however the vocabulary is cut."""
    return np.asarray(np.minimum(columns.tokens(job.seq), LOSS_CHUNK * columns.tp))


def _head_at_once(job: Job, columns: LayoutColumns, norm: Array) -> HeadActivations:
    """A few tokens' logits at a time; the gradients of hidden states (in the count of `norm`) and, in fp32, of the weight stay.

    In forward the norm's output and a chunk's logits stand beside them, with sequence parallelism also hidden states gathered
    for this chunk and the next, and gradients before they are scattered; in backward both gradients once more as they leave.
    """
    model, tokens, b = job.model, columns.tokens(job.seq), compute_bytes(job)
    weight, chunk = model.vocab * model.hidden / columns.tp * (job.adapter_rank is None), loss_chunk(job, columns)
    saved = norm + FP32 * weight
    residual = b * tokens * model.hidden / columns.sequence_cut
    gathered = b * model.hidden * (np.minimum(tokens, 2 * LOSS_CHUNK * columns.tp) + chunk)
    forward = saved + residual + b * chunk * model.vocab / columns.tp + np.where(columns.sequence_cut > 1, gathered, 0.0)
    peak = saved + residual + b * weight
    if job.precision == "fp16":  # which must scale its gradients before: head and loss are one compiled graph
        saved = forward = peak = norm + b * tokens * model.vocab
    return HeadActivations(saved, peak, forward, np.zeros(len(columns)))


def _head_chunked_gradients(job: Job, columns: LayoutColumns) -> HeadActivations:
    """Logits of an eighth of the tokens at a time. Live beside them: the norm's output, gathered, and a copy of its chunks, and
    the gradient of hidden states in fp32. `backward` has the last chunk's logits, when the head's gradient is reduced.
    """
    tokens, b = columns.tokens(job.seq), compute_bytes(job)
    wide = tokens * job.model.hidden
    hidden = norm_bytes(job) * wide / columns.sequence_cut + (2 * b + FP32) * wide
    logits = tokens / CHUNKS * job.model.vocab / columns.tp
    # Over a cut vocabulary, where torch's loss is not compiled: shifted logits, softmax and gradient, operator by operator
    # zeros too; else log-softmax and two gradients, or compiled the gradient in the compute format.
    compiled = job.framework.loss == "chunked-gradients"
    each = np.where(columns.tp > 1, (3 if compiled else 4) * FP32 + b, 2 * b if compiled else 3 * FP32 + b)
    peak = hidden + each * logits
    saved = norm_bytes(job) * wide / columns.sequence_cut + b * wide
    return HeadActivations(np.asarray(saved), np.asarray(peak), np.asarray(peak), np.asarray(hidden + b * logits))
