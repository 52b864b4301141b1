"""The decoder-only transformer of the presets, dense or with experts, in plain PyTorch.

Nothing here depends on a layout: parallelism replaces submodules from outside, so head counts and lengths are read from the
input tensors. A pipeline stage is a slice of the model, and its parameters have the names of the whole model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ultrascale.model import adapters, flex, linear_attention, mamba
from ultrascale.model.adapters import Adapters
from ultrascale.model.latent_attention import LatentAttention
from ultrascale.model.linear_attention import GatedDeltaNet, GatedDeltaRule
from ultrascale.model.mamba import Mamba2Mixer, StateSpace
from ultrascale.model.moe import MixtureOfExperts, Router
from ultrascale.model.operators import LayerNorm, RMSNorm, activation_of, at_least_fp32
from ultrascale.model.rotary import Rope, query_factors, tables
from ultrascale.model.self_attention import Attention, CausalAttention, Mask, MultiLinear, window_bias
from ultrascale.specs.engine import model_problem
from ultrascale.specs.errors import SpecError
from ultrascale.specs.model import Model

IGNORE_INDEX = -100  # the target of a token without loss
EMBEDDING, HEAD, EMBEDDING_AHEAD = "embed.tokens.weight", "head.linear.weight", "embed_ahead.tokens.weight"


class MLP(nn.Module):
    def __init__(self, model: Model, width: int) -> None:
        super().__init__()
        names = ("gate", "up") if model.gated else ("up",)
        self.inputs = MultiLinear(model.hidden, dict.fromkeys(names, width), model.mlp_bias)
        self.activation = activation_of(model)
        self.down = nn.Linear(width, model.hidden, bias=model.mlp_bias)
        self.adapters: Adapters | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.activate(x))

    def activate(self, x: Tensor) -> Tensor:
        inner = self.inputs(x)
        if self.adapters is not None:
            inner = self.adapters.add_to_inputs(x, inner)
        active: Tensor = self.activation(*inner)
        return active

    def project(self, active: Tensor) -> Tensor:
        out: Tensor = self.down(active) if self.adapters is None else self.adapters.output_with(active, self.down)
        return out


class Block(nn.Module):
    """A layer. The norms and the sublayer that a model does not have are None."""

    def __init__(self, model: Model, index: int) -> None:
        super().__init__()
        before, after = (model.norm_placement in (place, "both") for place in ("pre", "post"))
        kind = model.kind(index)
        mixes, has_mlp = kind.mixer != "none", kind.mlp != "none"
        self.attention_norm = _norm(model) if before and mixes else None
        self.attention = _mixer(model, index)
        self.attention_post_norm = _norm(model) if after and mixes else None
        self.mlp_norm = _norm(model) if before and has_mlp and model.parallel_residual != "one_norm" else None
        self.mlp = (_experts(model) if kind.mlp == "moe" else MLP(model, model.ffn)) if has_mlp else None
        self.mlp_post_norm = _norm(model) if after and has_mlp else None
        self.parallel_residual = model.parallel_residual
        self.residual_scale = model.residual_scale

    def forward(self, x: Tensor, rope: Rope | Tensor | None, bias: Mask | None = None) -> Tensor:
        if self.attention is None or self.mlp is None:
            return x + self._scaled(self._only_sublayer(x, rope, bias))
        attention_input = _normed(x, self.attention_norm)
        attended = self._scaled(_normed(self.attention(attention_input, rope, bias), self.attention_post_norm))
        if self.parallel_residual == "none":
            x = x + attended
            return x + self._scaled(_normed(self.mlp(_normed(x, self.mlp_norm)), self.mlp_post_norm))
        mlp_input = attention_input if self.parallel_residual == "one_norm" else _normed(x, self.mlp_norm)
        return x + attended + self._scaled(self.mlp(mlp_input))

    def _only_sublayer(self, x: Tensor, rope: Rope | Tensor | None, bias: Mask | None) -> Tensor:
        if self.attention is not None:
            attended: Tensor = self.attention(_normed(x, self.attention_norm), rope, bias)
            return attended
        assert self.mlp is not None
        out: Tensor = self.mlp(_normed(x, self.mlp_norm))
        return out

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.residual_scale == 1 else x * self.residual_scale


class PredictionBlock(Block):
    """A layer of multi-token prediction: reads the hidden state of a token, and the embedding of one that follows it."""

    def __init__(self, model: Model, index: int) -> None:
        super().__init__(model, index)
        self.embedding_norm, self.hidden_norm, self.final_norm = _norm(model), _norm(model), _norm(model)
        self.projection = nn.Linear(2 * model.hidden, model.hidden, bias=False)

    def forward(
        self, x: Tensor, rope: Rope | Tensor | None, bias: Mask | None = None, embedded: Tensor | None = None
    ) -> Tensor:
        assert embedded is not None
        both = torch.cat((self.embedding_norm(embedded), self.hidden_norm(x)), -1)
        out: Tensor = self.final_norm(super().forward(self.projection(both), rope, bias))
        return out


def _mixer(model: Model, index: int) -> Attention | LatentAttention | GatedDeltaNet | Mamba2Mixer | None:
    kind = model.kind(index).mixer
    if kind == "none":
        return None
    if kind == "linear" and model.linear_attention is not None:
        return GatedDeltaNet(model, model.linear_attention)
    if kind == "mamba" and model.mamba is not None:
        return Mamba2Mixer(model, model.mamba)
    return Attention(model, index) if model.mla is None else LatentAttention(model, model.mla)


def _normed(x: Tensor, norm: nn.Module | None) -> Tensor:
    return x if norm is None else norm(x)


class Embedding(nn.Module):
    """tokens [b, s] and their positions [s] -> [b, s, hidden]."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model.vocab, model.hidden)
        learned = model.positions == "learned" and model.max_positions is not None
        self.positions = nn.Embedding(model.max_positions or 0, model.hidden) if learned else None
        self.scale = model.embedding_scale

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens)
        x = x if self.scale == 1 else x * self.scale
        return x if self.positions is None else x + self.positions(positions)


class CrossEntropy(nn.Module):
    """Summed cross-entropy in fp32 of logits [b, s, vocab]: a sum, so that parts of a batch add up to the whole.

    With `z_loss` the result is [2]: the cross-entropy, and z_loss · logsumexp(logits)² (PaLM, section 5), to be added to it.
    """

    z_loss = 0.0

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        scores, targets = at_least_fp32(logits).flatten(0, -2), targets.flatten()
        loss = F.cross_entropy(scores, targets, ignore_index=IGNORE_INDEX, reduction="sum")
        if not self.z_loss:
            return loss
        squares = scores.logsumexp(dim=-1).square() * (targets != IGNORE_INDEX)
        return torch.stack((loss, self.z_loss * squares.sum()))


Predict = Callable[[Tensor], Iterator[tuple[Tensor, Tensor]]]
"""of the normed output of the model's last layer: the normed hidden states of each further token, and its targets"""


class Head(nn.Module):
    mtp_weight = 0.0
    """of the sum of all further tokens' losses"""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm = _norm(model)
        self.linear = nn.Linear(model.hidden, model.vocab, bias=False)
        self.criterion = CrossEntropy()
        self.scale, self.softcap = model.logits_scale, model.logits_softcap

    def forward(self, x: Tensor, targets: Tensor | None = None, predict: Predict | None = None) -> Tensor:
        """The logits, or with `targets` their summed losses: cross-entropy and, if there is one, z-loss; with `predict` also
        the weighted losses of further tokens.
        """
        normed = self.norm(x)
        if targets is None:
            return self.logits(normed)
        if predict is None:
            return self.loss(normed, targets)
        # The last loss is the first in backward: its logits are freed before the layers of `predict` are reached.
        further = torch.stack([self.loss(*one).sum() for one in list(predict(normed))]).sum()
        return torch.cat((self.loss(normed, targets).view(-1), self.mtp_weight * further.view(1)))

    def scaled(self, normed: Tensor) -> Tensor:
        """The input of the linear layer, with the scale of the logits."""
        return normed if self.scale == 1 else normed * self.scale

    def logits(self, normed: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.scaled(normed))
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def loss(self, normed: Tensor, targets: Tensor) -> Tensor:
        """The summed losses of normed hidden states [b, s, h]."""
        loss: Tensor = self.criterion(self.logits(normed), targets)
        return loss


class Transformer(nn.Module):
    """The whole model, or the slice of it that a pipeline stage holds."""

    def __init__(self, model: Model, layers: range | None = None, embed: bool = True, head: bool = True) -> None:
        super().__init__()
        if (sentence := model_problem(model)) is not None:
            raise SpecError(sentence)
        self.model = model
        self.embed = Embedding(model) if embed else None
        layers = range(model.all_layers) if layers is None else layers
        # Keyed by the layer's index in the whole model: a parameter has the same name in every pipeline stage.
        self.blocks = nn.ModuleDict(
            {str(index): (PredictionBlock if model.kind(index).predicts else Block)(model, index) for index in layers}
        )
        self.head = Head(model) if head else None
        self.embed_ahead = Embedding(model) if model.mtp_depth and head and not embed else None
        """the last pipeline stage's copy of the embedding, for multi-token prediction"""
        self.context_ranks = 1
        """context-parallel ranks that share a sequence: its length is this times the number of positions given"""
        self.tie()

    def each_block(self) -> list[Block]:
        return cast(list[Block], list(self.blocks.values()))

    @property
    def embedding(self) -> Embedding | None:
        """Of this slice, the first stage's or the last one's copy."""
        return self.embed or self.embed_ahead

    def _blocks(self, predict: bool) -> dict[int, nn.Module]:
        """The layers by their index in the whole model, or those of multi-token prediction."""
        return {int(index): block for index, block in self.blocks.items() if (int(index) >= self.model.layers) == predict}

    def moe_layers(self) -> dict[int, MixtureOfExperts]:
        """The MoE layers by layer index in the whole model."""
        mlps = {int(index): block.mlp for index, block in zip(self.blocks, self.each_block(), strict=True)}
        return {index: mlp for index, mlp in mlps.items() if isinstance(mlp, MixtureOfExperts)}

    def routers(self) -> dict[int, Router]:
        return {index: mlp.router for index, mlp in self.moe_layers().items()}

    def tie(self) -> None:
        """Ties embedding and head to one Parameter, if the model is tied and this slice has both."""
        if self.model.tied_embeddings and self.head is not None:
            if self.embed is not None:
                self.head.linear.weight = self.embed.tokens.weight
            if self.embed_ahead is not None:
                self.embed_ahead.tokens.weight = self.head.linear.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Transformer:
        # Moving off the meta device creates a new Parameter for each name, which would untie embedding and head.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.tie()
        return self

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        ahead: Tensor | None = None,
    ) -> Tensor:
        """x: tokens [b, s], or hidden states [b, s, hidden] in a stage without embedding; positions [s]: of these tokens.

        Returns hidden states in a stage without head; otherwise logits, or the summed loss of `targets` [b, s]. `documents`
        [b, s]: the document index of each token; attention stays within a document, and states begin anew. `ahead` [b, s,
        depth, 2]: what multi-token prediction reads and predicts, from `tokens_ahead`; without it only the next token is
        predicted.
        """
        embedded: tuple[Tensor, ...] = ()
        if ahead is not None:
            further = ahead[..., 0].unbind(-1)
            if self.embed is not None:  # one look-up for all
                x, *embedded = self.embed(torch.cat((x, *further)), positions).chunk(1 + len(further))
            elif self.embed_ahead is not None:
                embedded = self.embed_ahead(torch.cat(further), positions).chunk(len(further))
        elif self.embed is not None:
            x = self.embed(x, positions)
        ropes, masks = self._ropes(x, positions), self._masks(x, len(positions), documents)
        starts = () if documents is None else (_starts(documents),)
        temperature = self.model.attention_temperature
        factors = None if temperature is None else query_factors(temperature, positions)

        def arguments(index: int) -> tuple[Rope | Mask | None, ...]:
            """Of a layer, beside its input."""
            local, rotates = self.model.window(index) is not None, self.model.rotates(index)
            has_state = self.model.kind(index).mixer in ("linear", "mamba")
            return ropes[local] if rotates else factors, *(starts if has_state else masks[local])

        def predict(normed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
            assert ahead is not None
            pairs = zip(embedded, ahead[..., 1].unbind(-1), strict=True)
            for (index, block), (embedding, wanted) in zip(self._blocks(predict=True).items(), pairs, strict=True):
                rope, *bias = arguments(index)
                normed = block(normed, rope, *(bias or (None,)), embedding)
                yield normed, wanted

        for index, block in self._blocks(predict=False).items():
            x = block(x, *arguments(index))
        if self.head is not None:
            x = self.head(x, targets) if ahead is None else self.head(x, targets, predict)
        return x

    def _ropes(self, x: Tensor, positions: Tensor) -> dict[bool, Rope]:
        """The rotary tables of layers with full attention (False) and with a window (True), computed once."""
        model = self.model
        if model.positions != "rotary":
            return {}
        length = len(positions) * self.context_ranks
        rope = self._cast(tables(model, positions, length), x)
        local = model.local_rope_theta
        return {False: rope, True: rope if local is None else self._cast(tables(model, positions, length, local), x)}

    @staticmethod
    def _cast(rope: Rope, x: Tensor) -> Rope:
        """Once: each block would save its own copies, which the GPU kernels do not."""
        return rope if x.is_cuda else (rope[0].to(x.dtype), rope[1].to(x.dtype))

    def _masks(self, x: Tensor, length: int, documents: Tensor | None) -> dict[bool, tuple[Mask, ...]]:
        """The attention masks of layers without and with a window, computed once; empty if the layer's core needs none."""
        model, found = self.model, dict[bool, tuple[Mask, ...]]()
        plain = self._has_plain_cores()
        by_flex = x.is_cuda and flex.why_not(model.head_dim, x.dtype) is None
        special = model.attention_softcap is not None or model.attention_sinks
        for local in (False, True):
            window = model.masked_window(length, documents is not None) if local else None
            # Only CausalAttention takes a mask: the core that context parallelism replaces it with handles the window itself.
            if by_flex and (documents is not None or (plain and (window is not None or special))):
                found[local] = (flex.mask(length, window, documents, x.device, model.chunked_window),)
            else:
                found[local] = self._dense_mask(x, length, window if plain else None, documents, model.chunked_window)
        return found

    @staticmethod
    def _dense_mask(
        x: Tensor, length: int, window: int | None, documents: Tensor | None, chunked: bool = False
    ) -> tuple[Mask, ...]:
        # In the dtype that attention needs: each block would convert a boolean mask and save its own copy.
        near = None if window is None else window_bias(length, window, x.dtype, x.device, chunked)
        if documents is None:
            return () if near is None else (near,)
        visible = document_bias(documents, x.dtype)
        return (visible if near is None else visible.add_(near),)

    def _has_plain_cores(self) -> bool:
        cores = (block.attention.core for block in self.each_block() if block.attention is not None)
        return all(isinstance(core, CausalAttention | GatedDeltaRule | StateSpace) for core in cores)


def copy_of_embedding(model: Model) -> str | None:
    """The parameter of the last of several pipeline stages that is a copy of the embedding, and has to stay one."""
    return HEAD if model.tied_embeddings else EMBEDDING_AHEAD if model.mtp_depth else None


def _starts(documents: Tensor) -> Tensor:
    """[b, s]: which tokens are the first of their document."""
    return documents.diff(dim=1, prepend=documents[:, :1] - 1) != 0


def document_bias(documents: Tensor, dtype: torch.dtype) -> Tensor:
    """[b, 1, s, s]: 0 where the second token is in the first's document and not later, else minus infinity."""
    visible = (documents.unsqueeze(2) == documents.unsqueeze(1)).tril()
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -math.inf).unsqueeze(1)


def _experts(model: Model) -> MixtureOfExperts:
    moe = model.moe
    assert moe is not None
    return MixtureOfExperts(model, moe, MLP(model, moe.shared_expert_ffn) if moe.shared_experts else None)


def _norm(model: Model) -> nn.Module:
    if model.norm == "layernorm":
        return LayerNorm(model.hidden, model.norm_eps, bias=model.norm_bias)
    return RMSNorm(model.hidden, model.norm_eps)


STD = 0.02  # GPT-2's; weights that write to the residual stream divide it by the root of their number


def full_weight(name: str, shape: torch.Size, seed: int, model: Model, device: torch.device | str) -> Tensor:
    """The whole initial tensor in fp32; a rank that holds a shard takes its part of it."""
    if adapters.is_adapter(name):
        return adapters.initialize(name, torch.empty(shape, device=device), _generator(name, seed, device))
    for mixer in (linear_attention, mamba):
        if mixer.is_initialized_here(name):
            drawn: Tensor = mixer.initialize(name, torch.empty(shape, device=device), _generator(name, seed, device))
            return drawn
    if name.endswith("norm.weight"):
        return torch.ones(shape, device=device)
    if name.endswith("bias"):
        return torch.zeros(shape, device=device)
    if name == copy_of_embedding(model):
        name = EMBEDDING  # the last stage must draw the same values as the first
    residual = name.endswith(("attention.out.weight", "down.weight", "experts.down"))
    std = STD / math.sqrt(model.sublayers) if residual else STD
    return torch.empty(shape, device=device).normal_(0.0, std, generator=_generator(name, seed, device))


def _generator(name: str, seed: int, device: torch.device | str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)  # 63 bits: a generator's seed is signed
