"""The decoder-only transformer of the presets, dense or with experts, in plain PyTorch.

Nothing here depends on a layout: parallelism replaces submodules from outside, so head counts and lengths are read from the
input tensors. A pipeline stage is a slice of the model, and its parameters have the names of the whole model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask

from ultrascale.model import flex
from ultrascale.model.attention import causal_attention
from ultrascale.model.moe import MixtureOfExperts, Router
from ultrascale.model.operators import ACTIVATIONS, LayerNorm, RMSNorm, at_least_fp32
from ultrascale.model.rotary import Rope, rotate, tables
from ultrascale.specs.engine import model_problem
from ultrascale.specs.errors import SpecError
from ultrascale.specs.model import Model

IGNORE_INDEX = -100  # the target of a token without loss

Mask = Any
"""an attention mask: a Tensor that is added to scores, or a BlockMask on a GPU"""


class MultiLinear(nn.Module):
    """Several linear layers with one input, so that the input is gathered or cast once."""

    def __init__(self, width: int, outputs: Mapping[str, int], bias: bool) -> None:
        super().__init__()
        for name, output in outputs.items():
            self.add_module(name, nn.Linear(width, output, bias=bias))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(linear(x) for linear in self.children())


class CausalAttention(nn.Module):
    """Causal attention: q [b, s, heads, d], k and v [b, s, kv_heads, d] -> [b, s, heads, d].

    `bias` [b, 1, s, s] is added to the scores: 0 for pairs that attend, minus infinity for all others. A block mask in its
    place is the complete mask, including the window.
    """

    def __init__(self, sliding_window: int | None = None) -> None:
        super().__init__()
        self.sliding_window = sliding_window
        self.backends: list[SDPBackend] = []
        """backends of torch's attention on a GPU, the fastest first (kernels/autotune.py); empty: torch's own order"""
        self.kernel: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
        """a faster kernel to use instead of torch's backends"""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Mask | None = None) -> Tensor:
        if isinstance(bias, BlockMask):
            return flex.attend(q, k, v, bias)
        length = q.shape[1]
        mask = bias
        if self.sliding_window is not None and self.sliding_window < length:
            near = torch.ones(length, length, dtype=torch.bool, device=q.device)
            near = near.tril().triu(1 - self.sliding_window)  # a token attends to itself and the window - 1 before it
            mask = near if bias is None else bias.masked_fill(~near, -math.inf)
        elif bias is None and self.kernel is not None:
            return self.kernel(q, k, v)
        elif bias is None and q.device.type == "cpu" and not torch.compiler.is_compiling():
            return causal_attention(q, k, v, q.shape[-1] ** -0.5)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if mask is None and self.backends:
            with sdpa_kernel(self.backends, set_priority=True):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return out.transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        self.qkv = MultiLinear(model.hidden, {"q": model.q_dim, "k": model.kv_dim, "v": model.kv_dim}, model.qkv_bias)
        self.q_norm = RMSNorm(model.head_dim, model.norm_eps) if model.qk_norm else None
        self.k_norm = RMSNorm(model.head_dim, model.norm_eps) if model.qk_norm else None
        self.core = CausalAttention(model.sliding_window)
        self.out = nn.Linear(model.q_dim, model.hidden, bias=model.attention_output_bias)

    def forward(self, x: Tensor, rope: Rope | None, bias: Mask | None = None) -> Tensor:
        q, k, v = (projected.unflatten(-1, (-1, self.head_dim)) for projected in self.qkv(x))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        heads = self.core(q, k, v) if bias is None else self.core(q, k, v, bias)
        out: Tensor = self.out(heads.flatten(-2))
        return out


class MLP(nn.Module):
    def __init__(self, model: Model, width: int) -> None:
        super().__init__()
        names = ("gate", "up") if model.gated else ("up",)
        self.inputs = MultiLinear(model.hidden, dict.fromkeys(names, width), model.mlp_bias)
        self.activation = ACTIVATIONS[model.activation]
        self.down = nn.Linear(width, model.hidden, bias=model.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.activation(*self.inputs(x)))
        return out


class Block(nn.Module):
    def __init__(self, model: Model, index: int) -> None:
        super().__init__()
        self.attention_norm = _norm(model)
        self.attention = Attention(model)
        self.mlp_norm = _norm(model)
        self.mlp = _experts(model) if model.is_moe_layer(index) else MLP(model, model.ffn)

    def forward(self, x: Tensor, rope: Rope | None, bias: Mask | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, bias)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Embedding(nn.Module):
    """tokens [b, s] and their positions [s] -> [b, s, hidden]."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model.vocab, model.hidden)
        learned = model.positions == "learned" and model.max_positions is not None
        self.positions = nn.Embedding(model.max_positions or 0, model.hidden) if learned else None

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens)
        return x if self.positions is None else x + self.positions(positions)


class CrossEntropy(nn.Module):
    """Summed cross-entropy in fp32 of logits [b, s, vocab]: a sum, so that parts of a batch add up to the whole."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            at_least_fp32(logits).flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )


class Head(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm = _norm(model)
        self.linear = nn.Linear(model.hidden, model.vocab, bias=False)
        self.criterion = CrossEntropy()

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        logits: Tensor = self.linear(self.norm(x))
        if targets is None:
            return logits
        loss: Tensor = self.criterion(logits, targets)
        return loss


class Transformer(nn.Module):
    """The whole model, or the slice of it that a pipeline stage holds."""

    def __init__(self, model: Model, layers: range | None = None, embed: bool = True, head: bool = True) -> None:
        super().__init__()
        if (sentence := model_problem(model)) is not None:
            raise SpecError(sentence)
        self.model = model
        self.embed = Embedding(model) if embed else None
        layers = range(model.layers) if layers is None else layers
        # Keyed by the layer's index in the whole model: a parameter has the same name in every pipeline stage.
        self.blocks = nn.ModuleDict({str(index): Block(model, index) for index in layers})
        self.head = Head(model) if head else None
        self.context_ranks = 1
        """context-parallel ranks that share a sequence: its length is this times the number of positions given"""
        self.tie()

    def each_block(self) -> list[Block]:
        return cast(list[Block], list(self.blocks.values()))

    def moe_layers(self) -> dict[int, MixtureOfExperts]:
        """The MoE layers by layer index in the whole model."""
        mlps = {int(index): block.mlp for index, block in zip(self.blocks, self.each_block(), strict=True)}
        return {index: mlp for index, mlp in mlps.items() if isinstance(mlp, MixtureOfExperts)}

    def routers(self) -> dict[int, Router]:
        return {index: mlp.router for index, mlp in self.moe_layers().items()}

    def tie(self) -> None:
        """Ties embedding and head to one Parameter, if the model is tied and this slice has both."""
        if self.model.tied_embeddings and self.embed is not None and self.head is not None:
            self.head.linear.weight = self.embed.tokens.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Transformer:
        # Moving off the meta device creates a new Parameter for each name, which would untie embedding and head.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.tie()
        return self

    def forward(self, x: Tensor, positions: Tensor, targets: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """x: tokens [b, s], or hidden states [b, s, hidden] in a stage without embedding; positions [s]: of these tokens.

        Returns hidden states in a stage without head; otherwise logits, or the summed loss of `targets` [b, s]. `documents`
        [b, s]: the document index of each token; attention stays within a document.
        """
        length = len(positions) * self.context_ranks
        rope = tables(self.model, positions, length) if self.model.positions == "rotary" else None
        if self.embed is not None:
            x = self.embed(x, positions)
        if rope is not None and not x.is_cuda:  # once: each block would save its own copies, which the GPU kernels do not
            rope = (rope[0].to(x.dtype), rope[1].to(x.dtype))
        bias = self._bias(x, len(positions), documents)
        for block in self.each_block():
            x = block(x, rope, *bias)
        if self.head is not None:
            x = self.head(x, targets)
        return x

    def _bias(self, x: Tensor, length: int, documents: Tensor | None) -> tuple[Mask, ...]:
        """The attention mask of all blocks, computed once; empty if plain causal attention is enough."""
        window = self.model.sliding_window
        window = window if window is not None and window < length else None
        # Only CausalAttention takes a mask: the core that context parallelism replaces it with handles the window itself.
        masked = documents is not None or (window is not None and self._has_plain_cores())
        if x.is_cuda and masked and flex.why_not(self.model.head_dim, x.dtype) is None:
            return (flex.mask(length, window, documents, x.device),)
        # In the dtype that attention needs: each block would convert a boolean mask and save its own copy.
        return () if documents is None else (document_bias(documents, x.dtype),)

    def _has_plain_cores(self) -> bool:
        return all(isinstance(block.attention.core, CausalAttention) for block in self.each_block())


def document_bias(documents: Tensor, dtype: torch.dtype) -> Tensor:
    """[b, 1, s, s]: 0 where the second token is in the first's document and not later, else minus infinity."""
    visible = (documents.unsqueeze(2) == documents.unsqueeze(1)).tril()
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -math.inf).unsqueeze(1)


def _experts(model: Model) -> MixtureOfExperts:
    moe = model.moe
    assert moe is not None
    return MixtureOfExperts(model, moe, MLP(model, moe.shared_expert_ffn) if moe.shared_experts else None)


def _norm(model: Model) -> nn.Module:
    kind = LayerNorm if model.norm == "layernorm" else RMSNorm
    return kind(model.hidden, model.norm_eps)


STD = 0.02  # GPT-2's; weights that write to the residual stream divide it by sqrt(2 · layers), their number


def full_weight(name: str, shape: torch.Size, seed: int, model: Model, device: torch.device | str) -> Tensor:
    """The whole initial tensor in fp32; a rank that holds a shard takes its part of it."""
    if name.endswith("norm.weight"):
        return torch.ones(shape, device=device)
    if name.endswith(".bias"):
        return torch.zeros(shape, device=device)
    if name == "head.linear.weight" and model.tied_embeddings:
        name = "embed.tokens.weight"  # a stage with only the head must draw the same values as the first stage
    residual = name.endswith(("attention.out.weight", "down.weight", "experts.down"))
    std = STD / math.sqrt(2 * model.layers) if residual else STD
    return torch.empty(shape, device=device).normal_(0.0, std, generator=_generator(name, seed, device))


def _generator(name: str, seed: int, device: torch.device | str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)  # 63 bits: a generator's seed is signed
