"""Weights: every tensor of a model as data. Parameters, memory, FLOPs and communication are counted from these tables.

Counts follow the module trees of `transformers`, so that a total equals the elements of the published checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ultrascale.specs.blocks import LayerKind

if TYPE_CHECKING:
    from ultrascale.specs.model import Model


Number = TypeVar("Number", float, Any)  # or an array


@dataclass(frozen=True)
class WeightShape:
    """One tensor: its rows, among which FSDP shards it, and the elements of a row."""

    rows: int
    width: int = 1
    cut: str = "none"
    """what tp cuts: "rows"; "kv rows", never below one kv head, which is repeated tp / kv_heads times; "width"; or "none" """
    matmul: bool = True
    """multiplied by activations, so that a schedule with a split backward defers its gradient"""
    partial: bool = False
    """every tp rank has all of it but sees only its own heads or experts: its gradient is summed over tp"""

    @property
    def elements(self) -> int:
        return self.rows * self.width

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether Muon steps it, in a layer: a linear's or a router's weight, no vector. A norm's weight and bias are one entry
        of two columns.
        """
        return (self.matmul or self.partial) and min(self.rows, self.width) > 1


def elements(weights: Iterable[WeightShape]) -> int:
    return sum(weight.elements for weight in weights)


def norm(model: Model) -> WeightShape:
    return WeightShape(model.hidden, 2 if model.norm == "layernorm" and model.norm_bias else 1, matmul=False)


def norms(model: Model) -> list[WeightShape]:
    """Of one layer, those of queries and keys left out."""
    if model.one_sublayer:
        return [norm(model)]
    return [norm(model)] * (4 if model.norm_placement == "both" else 1 if model.parallel_residual == "one_norm" else 2)


def attention(model: Model) -> list[WeightShape]:
    h, bias = model.hidden, [WeightShape(model.hidden, matmul=False)] * model.attention_output_bias
    if model.mla is not None:
        return _latent_attention(model) + bias
    q, kv = (model.q_dim, "rows"), (model.kv_dim, "kv rows")
    weights = [WeightShape(rows, h, cut) for rows, cut in (q, kv, kv)] + [WeightShape(h, model.q_dim, "width")]
    if model.attention_gate:
        weights.append(WeightShape(model.q_dim, h, "rows"))
    if model.qkv_bias:
        weights += [WeightShape(rows, 1, cut, matmul=False) for rows, cut in (q, kv, kv)]
        weights += [WeightShape(model.q_dim, 1, "rows", matmul=False)] * model.attention_gate
    if model.attention_sinks:
        weights.append(WeightShape(model.heads, 1, "rows", matmul=False))
    if model.qk_norm and model.qk_norm_over == "all":
        return weights + [WeightShape(rows, 1, cut, matmul=False) for rows, cut in (q, kv)] + bias
    return weights + [WeightShape(model.head_dim, matmul=False, partial=True)] * (2 * model.qk_norm) + bias


def linear_attention(model: Model) -> list[WeightShape]:
    """Of a layer with linear attention: projections of queries, keys, values, their gate, step size and decay; convolutions;
    a decay and its bias for each value head, and the norm of each.
    """
    linear, h = model.linear_attention, model.hidden
    if linear is None:
        return []
    convolved = (linear.key_dim, linear.key_dim, linear.value_dim)
    projections = (*convolved, linear.value_dim, linear.value_heads, linear.value_heads)
    return [
        *(WeightShape(rows, h, "rows") for rows in projections),
        *(WeightShape(rows, linear.conv_kernel, "rows", matmul=False) for rows in convolved),
        *[WeightShape(linear.value_heads, 1, "rows", matmul=False)] * 2,
        WeightShape(linear.value_head_dim, matmul=False, partial=True),
        WeightShape(h, linear.value_dim, "width"),
    ]


def mamba(model: Model) -> list[WeightShape]:
    """Of a Mamba-2 layer: projections to gate, x, B, C and step size; convolutions; decay, bias of the step and skip of each
    head; the norm of its output.
    """
    mamba, h = model.mamba, model.hidden
    if mamba is None:
        return []
    convolved = (mamba.inner_dim, mamba.group_dim, mamba.group_dim)
    return [
        *(WeightShape(rows, h, "rows") for rows in (mamba.inner_dim, *convolved, mamba.heads)),
        *(WeightShape(rows, mamba.conv_kernel, "rows", matmul=False) for rows in convolved),
        *(WeightShape(rows, 1, "rows", matmul=False) for rows in (*convolved * mamba.conv_bias, *[mamba.heads] * 3)),
        WeightShape(mamba.inner_dim, 1, "rows", matmul=False),
        WeightShape(h, mamba.inner_dim, "width"),
    ]


def _latent_attention(model: Model) -> list[WeightShape]:
    """DeepSeek's: down-projections to latents on every tp rank, up-projections cut by heads, biases on the former."""
    mla, h, query = model.mla, model.hidden, model.heads * model.qk_head_dim
    assert mla is not None
    down = mla.kv_lora_rank + mla.qk_rope_head_dim
    weights = [
        WeightShape(down, h),
        WeightShape(mla.kv_lora_rank, matmul=False),
        WeightShape(model.heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank, "rows"),
        WeightShape(h, model.heads * mla.v_head_dim, "width"),
    ]
    biased = [down]
    if mla.q_lora_rank is None:
        weights.append(WeightShape(query, h, "rows"))
    else:
        weights += [WeightShape(mla.q_lora_rank, h), WeightShape(mla.q_lora_rank, matmul=False)]
        weights.append(WeightShape(query, mla.q_lora_rank, "rows"))
        biased.append(mla.q_lora_rank)
    return weights + [WeightShape(rows, matmul=False) for rows in biased if model.qkv_bias]


def mlp(model: Model, width: int) -> list[WeightShape]:
    if not width:
        return []
    inner = [WeightShape(width, model.hidden, "rows")] * (1 + model.gated)
    biases = [WeightShape(width, 1, "rows", matmul=False)] * (1 + model.gated) + [WeightShape(model.hidden, matmul=False)]
    return [*inner, WeightShape(model.hidden, width, "width"), *(biases if model.mlp_bias else [])]


def router(model: Model) -> list[WeightShape]:
    """What chooses experts in one layer, with the gate of a shared one. Its balancing bias is a buffer that no rank shards."""
    moe = model.moe
    if moe is None:
        return []
    weights = [WeightShape(moe.experts, model.hidden, matmul=False, partial=True)]
    weights += [WeightShape(moe.experts, matmul=False, partial=True)] * moe.logits_bias
    return weights + [WeightShape(1, model.hidden, matmul=False, partial=True)] * moe.shared_gate


def router_bias(model: Model) -> int:
    return model.moe.experts * model.moe.router_bias if model.moe is not None else 0


def shared_expert(model: Model) -> list[WeightShape]:
    return mlp(model, model.moe.shared_expert_ffn if model.moe is not None else 0)


@dataclass(frozen=True)
class AdapterInput:
    """What several linear layers read, and the rows of each, with what tp cuts of them."""

    width: int
    outputs: tuple[tuple[int, str], ...]


def adapter_inputs(model: Model) -> list[AdapterInput]:
    """Of the projections of queries, keys and values."""
    h, query = model.hidden, (model.q_dim, "rows")
    if (mla := model.mla) is None:
        return [AdapterInput(h, (query, (model.kv_dim, "kv rows"), (model.kv_dim, "kv rows")))]
    latents = [mla.kv_lora_rank + mla.qk_rope_head_dim, *([] if mla.q_lora_rank is None else [mla.q_lora_rank])]
    keys_values = (model.heads * (mla.qk_nope_head_dim + mla.v_head_dim), "rows")
    return [
        AdapterInput(h, tuple((rows, "none") for rows in latents)),
        AdapterInput(mla.q_lora_rank or h, (query,)),
        AdapterInput(mla.kv_lora_rank, (keys_values,)),
    ]


def adapted_ffn(model: Model, kind: LayerKind) -> int:
    """Width of the MLP that has adapters: a dense one, or shared experts."""
    if kind.has_experts:
        return 0 if model.moe is None else model.moe.shared_expert_ffn
    return model.ffn


def adapters(model: Model, kind: LayerKind, rank: int, everywhere: bool, joint: bool) -> list[WeightShape]:
    """Low-rank adapters of one layer: beside the projections of queries, keys and values, or beside every matrix of attention
    and MLP but routed experts'. `joint`: q, k and v share the matrix down to the rank.
    """
    h, shared = model.hidden, kind.has_experts

    def of_inputs(one: AdapterInput, downs: int, partial: bool = False) -> list[WeightShape]:
        return [
            *[WeightShape(rank, one.width, partial=partial)] * downs,
            *(WeightShape(rows, rank, cut) for rows, cut in one.outputs),
        ]

    def of_output(width: int, partial: bool = False) -> list[WeightShape]:
        return [WeightShape(rank, width, "width"), WeightShape(h, rank, partial=partial)]

    found = [weight for one in adapter_inputs(model) for weight in of_inputs(one, 1 if joint else len(one.outputs))]
    if not everywhere:
        return found
    found += of_output(model.heads * model.v_head_dim)
    if ffn := adapted_ffn(model, kind):
        # Each tp rank has a part of a shared expert, and its adapters see that.
        inner = AdapterInput(h, ((ffn, "rows"),) * (1 + model.gated))
        found += of_inputs(inner, len(inner.outputs), shared) + of_output(ffn, shared)
    return found


def mixer(model: Model, kind: LayerKind) -> list[WeightShape]:
    """Of attention, or of what is in its place."""
    if kind.mixer == "none":
        return []
    return {"attention": attention, "linear": linear_attention, "mamba": mamba}[kind.mixer](model)


def prediction(model: Model) -> list[WeightShape]:
    """Of a layer of multi-token prediction: norms of the embedding, of the hidden state and of its output; a projection."""
    return [WeightShape(model.hidden, 2 * model.hidden), *[norm(model)] * 3]


def layer_weights(model: Model, kind: LayerKind) -> list[WeightShape]:
    """Of one layer, routed experts left out."""
    trunk = [*mixer(model, kind), *norms(model), *(prediction(model) if kind.predicts else [])]
    if kind.mlp == "none":
        return trunk
    return [*trunk, *(router(model) + shared_expert(model) if kind.mlp == "moe" else mlp(model, model.ffn))]


def positions(model: Model) -> list[WeightShape]:
    return [WeightShape(model.max_positions or 0, model.hidden, matmul=False)] if model.positions == "learned" else []


def vocabulary(model: Model) -> WeightShape:
    """The matrix of the embedding, and of the head."""
    return WeightShape(model.vocab, model.hidden, "rows")


def embedding(model: Model) -> list[WeightShape]:
    return [vocabulary(model), *positions(model)]


def mean_multiplied_elements(model: Model) -> float:
    """Of a layer in the mean, less dense MLPs where others have experts."""
    kinds = model.layer_kinds
    counted = {kind: count for kind, count in kinds.items() if model.moe is None or kind.mlp != "dense"} or kinds
    return sum(count * multiplied_elements(model, kind) for kind, count in counted.items()) / sum(counted.values())


def multiplied_elements(model: Model, kind: LayerKind) -> float:
    """Elements of one layer's matrices that a token is multiplied by: of routed experts, those that it is sent to."""
    found = float(elements(weight for weight in layer_weights(model, kind) if weight.matmul))
    if kind.has_experts and model.moe is not None:
        expert = elements(weight for weight in mlp(model, model.moe.expert_ffn) if weight.matmul)
        found += model.hidden * model.moe.experts + model.moe.top_k * expert
    return found
