"""Linear attention by the gated delta rule (Gated DeltaNet, Yang et al. 2024): a state per head in place of keys and values.

A head's state S [dk, dv] decays with each token, and what it answers to the token's key moves towards the token's value:
S ← decay · S + k ⊗ step · (v − kᵀ(decay · S)); the output is qᵀS. Chunks of tokens are computed by GEMMs, and each hands its
state to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ultrascale.model.operators import RMSNorm, at_least_fp32
from ultrascale.model.rotary import Rope
from ultrascale.model.self_attention import MultiLinear
from ultrascale.specs.blocks import LinearAttention
from ultrascale.specs.model import Model

CHUNK = 64  # tokens
NORM_EPS = 1e-6  # of queries and keys, which are scaled to length one
FORGET = -40.0
"""log decay of a document's first token: e⁻⁴⁰ is nothing beside 1, and sums of it keep their digits"""


class SequenceOfHeads:
    """How a layer whose heads pass states from token to token gets its sequence: here this rank holds it, with all heads."""

    def gather(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Of inputs [b, this rank's tokens, channels in the order of heads], all tokens and the channels of its heads."""
        return inputs

    def scatter(self, heads: Tensor) -> Tensor:
        """The way back: [b, all tokens, its heads, …] to [b, this rank's tokens, heads, …]."""
        return heads

    def own(self, parameter: Tensor) -> Tensor:
        """Of a parameter [channels or heads, …], its heads' part."""
        return parameter


class ShortConvolution(nn.Module):
    """A causal convolution of each channel over a few tokens, then SiLU, of several inputs [b, s, channels]."""

    def __init__(self, channels: Mapping[str, int], kernel: int, bias: bool = False) -> None:
        super().__init__()
        self.names = tuple(channels)
        for name, count in channels.items():
            self.register_parameter(name, nn.Parameter(torch.empty(count, 1, kernel)))
            if bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(count)))

    def forward(self, *inputs: Tensor, sequence: SequenceOfHeads, starts: Tensor | None = None) -> tuple[Tensor, ...]:
        age = [] if starts is None else [_since(starts).unsqueeze(-1)]
        own = ([getattr(self, key) for key in (name, f"{name}_bias") if hasattr(self, key)] for name in self.names)
        convolve = partial(_convolve, has_bias=hasattr(self, f"{self.names[0]}_bias"))
        return tuple(recomputed(convolve, x, *map(sequence.own, each), *age) for x, each in zip(inputs, own, strict=True))


def _since(starts: Tensor) -> Tensor:
    """[b, s]: how many tokens of its document each has before it."""
    places = torch.arange(starts.shape[1], device=starts.device).expand(starts.shape)
    return places - places.where(starts, 0).cummax(1).values


def _convolve(x: Tensor, weight: Tensor, *others: Tensor, has_bias: bool) -> Tensor:
    """`others`: a bias, if it has one, and how many tokens of its document each token [b, s, 1] has before it."""
    taps = weight.to(x.dtype).squeeze(1).unbind(-1)
    padded = F.pad(x, (0, 0, len(taps) - 1, 0))
    found = x * taps[-1]
    for index, tap in enumerate(taps[:-1]):
        before = padded[:, index : index + x.shape[1]]
        if others[has_bias:]:
            before = before.where(others[-1] >= len(taps) - 1 - index, 0)
        found = found + before * tap
    return F.silu(found + others[0].to(x.dtype) if has_bias else found)


class GatedDeltaNet(nn.Module):
    """x [b, s, hidden] -> [b, s, hidden]; positions come from the order alone."""

    def __init__(self, model: Model, linear: LinearAttention) -> None:
        super().__init__()
        self.key_head_dim, self.value_head_dim = linear.key_head_dim, linear.value_head_dim
        outputs = {
            "q": linear.key_dim,
            "k": linear.key_dim,
            "v": linear.value_dim,
            "gate": linear.value_dim,
            "step": linear.value_heads,
            "decay": linear.value_heads,
        }
        self.inputs = MultiLinear(model.hidden, outputs, bias=False)
        channels = {"q": linear.key_dim, "k": linear.key_dim, "v": linear.value_dim}
        self.conv = ShortConvolution(channels, linear.conv_kernel)
        self.log_decay = nn.Parameter(torch.empty(linear.value_heads))
        self.decay_bias = nn.Parameter(torch.empty(linear.value_heads))
        self.core = GatedDeltaRule()
        self.sequence = SequenceOfHeads()
        self.output_norm = RMSNorm(linear.value_head_dim, model.norm_eps)
        self.out = nn.Linear(linear.value_dim, model.hidden, bias=False)

    def forward(self, x: Tensor, rope: Rope | None = None, starts: Tensor | None = None) -> Tensor:
        """`starts` [b, s]: which tokens begin a document, with a new state."""
        q, k, v, gate, step, decay = self.inputs(x)
        q, k, v, step, decay = self.sequence.gather(q, k, v, step, decay)
        q, k, v = self.conv(q, k, v, sequence=self.sequence, starts=starts)
        q, k = (one.unflatten(-1, (-1, self.key_head_dim)) for one in (q, k))
        v, gate = (one.unflatten(-1, (-1, self.value_head_dim)) for one in (v, gate))
        log_rate, bias = (at_least_fp32(self.sequence.own(one)) for one in (self.log_decay, self.decay_bias))
        log_decay = -log_rate.exp() * F.softplus(at_least_fp32(decay) + bias)
        if starts is not None:
            log_decay = log_decay.masked_fill(starts.unsqueeze(-1), FORGET)
        heads = self.sequence.scatter(self.core(q, k, v, log_decay, at_least_fp32(step).sigmoid()))
        gated = self.output_norm(heads) * F.silu(gate)
        out: Tensor = self.out(gated.flatten(-2))
        return out


class GatedDeltaRule(nn.Module):
    """q, k [b, s, key heads, dk], v [b, s, value heads, dv], log_decay and step [b, s, value heads] -> like v.

    Computed in fp32: the inverse of a chunk's triangular system loses half precision.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernel: Callable[..., Tensor] | None = None
        """in place of the plain rule, on a GPU (kernels/delta_rule.py)"""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, step: Tensor) -> Tensor:
        compute = _plain_rule if self.kernel is None else self.kernel
        return compute(q, k, v, log_decay, step)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it would unroll the loop over chunks
def _plain_rule(*inputs: Tensor) -> Tensor:
    return recomputed(gated_delta_rule, *inputs)


def recomputed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """`function` of these, which alone are saved: it is computed again in backward. A compiler chooses what it saves itself."""
    if torch.compiler.is_compiling():
        return function(*inputs)
    out: Tensor = _Recomputed.apply(function, *inputs)  # type: ignore[no-untyped-call]
    return out


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        with torch.enable_grad():
            inputs = [one.detach().requires_grad_(asked) for one, asked in zip(ctx.saved_tensors, needed, strict=True)]
            asked_for = [one for one in inputs if one.requires_grad]
            found = iter(torch.autograd.grad(ctx.function(*inputs), asked_for, grad))
        return (None, *(next(found) if one.requires_grad else None for one in inputs))


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, step: Tensor, chunk: int = CHUNK) -> Tensor:
    repeats, (batch, length, heads, _) = v.shape[2] // q.shape[2], v.shape
    unit_q, unit_k = (_unit(one).repeat_interleave(repeats, 2) for one in (q, k))
    # [chunks, batch · heads, chunk, …]; padding has step 0 and decay 1, which change no state.
    q, k, values = (_chunks(one, chunk) for one in (unit_q * q.shape[-1] ** -0.5, unit_k, at_least_fp32(v)))
    steps, logs = (_chunks(one.unsqueeze(-1), chunk) for one in (step, log_decay))

    total = logs.squeeze(-1).cumsum(-1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
    stepped = k * steps
    # Each token's value depends on those before it in the chunk: a unit triangular system.
    system = (stepped @ k.mT) * between
    moved = torch.linalg.solve_triangular(
        system, torch.cat((values * steps, stepped * total.exp().unsqueeze(-1)), -1), upper=False, unitriangular=True
    )
    new_values, old_keys = moved.split((values.shape[-1], k.shape[-1]), -1)
    scores = (q @ k.mT) * between
    queries = q * total.exp().unsqueeze(-1)
    keys = k * (total[..., -1:] - total).exp().unsqueeze(-1)
    decays = total[..., -1].exp()[..., None, None]

    state = values.new_zeros(batch * heads, k.shape[-1], values.shape[-1])
    outputs = []
    parts = (part.unbind() for part in (new_values, old_keys, queries, scores, keys, decays))
    for new, old, query, score, key, decay in zip(*parts, strict=True):
        written = torch.baddbmm(new, old, state, alpha=-1)
        outputs.append(torch.baddbmm(query @ state, score, written))
        state = torch.baddbmm(state * decay, key.mT, written)
    by_chunk = torch.stack(outputs, 1).unflatten(0, (batch, heads))  # type: ignore[no-untyped-call]
    out: Tensor = by_chunk.flatten(2, 3)[:, :, :length].transpose(1, 2).to(v.dtype)
    return out


def initialize(name: str, out: Tensor, generator: torch.Generator) -> Tensor:
    """Initial values of a layer's convolutions and decays: a state's half-life is between a token and some hundred."""
    if ".conv." in name:
        return out.uniform_(-1, 1, generator=generator).mul_(out.shape[-1] ** -0.5)
    if name.endswith("log_decay"):
        return out.uniform_(1, 16, generator=generator).log_()
    step = out.uniform_(math.log(1e-3), math.log(0.1), generator=generator).exp_()
    return step + torch.log(-torch.expm1(-step))  # whose softplus is the step


def is_initialized_here(name: str) -> bool:
    convolves = ".attention.conv." in name and not name.endswith("_bias")
    return convolves or name.endswith((".log_decay", ".decay_bias"))


def _unit(x: Tensor) -> Tensor:
    wide = at_least_fp32(x)
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + NORM_EPS)


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """[b, s, heads, n] -> [chunks, b · heads, chunk, n], contiguous: of a view, every GEMM would copy and save its own."""
    batch, length, heads, width = x.shape
    padded = F.pad(x, (0, 0, 0, 0, 0, -length % chunk)).view(batch, -1, chunk, heads, width)
    return padded.permute(1, 0, 3, 2, 4).reshape(-1, batch * heads, chunk, width).contiguous()
