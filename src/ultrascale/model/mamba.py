"""Mamba-2 (Dao & Gu 2024): a selective state space in place of attention.

A head's state S [state_dim, head_dim] decays with each token and adds what the token writes: S ← exp(−rate · step) · S +
step · B ⊗ x; the output is CᵀS + skip · x. Heads of a group share B and C. Chunks of tokens are computed by GEMMs (the state
space duality), and each hands its state to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ultrascale.model.linear_attention import CHUNK, FORGET, SequenceOfHeads, ShortConvolution
from ultrascale.model.operators import at_least_fp32
from ultrascale.model.rotary import Rope
from ultrascale.model.self_attention import MultiLinear
from ultrascale.specs.blocks import Mamba2
from ultrascale.specs.model import Model

SEGMENT = 1024  # tokens of a sequence whose intermediate tensors are live together


class Mamba2Mixer(nn.Module):
    """x [b, s, hidden] -> [b, s, hidden]; positions come from the order alone."""

    def __init__(self, model: Model, mamba: Mamba2) -> None:
        super().__init__()
        self.head_dim, self.state_dim = mamba.head_dim, mamba.state_dim
        convolved = {"x": mamba.inner_dim, "b": mamba.group_dim, "c": mamba.group_dim}
        self.inputs = MultiLinear(model.hidden, {"gate": mamba.inner_dim, **convolved, "step": mamba.heads}, bias=False)
        self.conv = ShortConvolution(convolved, mamba.conv_kernel, mamba.conv_bias)
        self.step_bias, self.log_rate, self.skip = (nn.Parameter(torch.empty(mamba.heads)) for _ in range(3))
        self.core = StateSpace(mamba.min_step)
        self.sequence = SequenceOfHeads()
        self.gated_norm = GatedGroupNorm(mamba.inner_dim, mamba.inner_dim // mamba.groups, model.norm_eps)
        self.out = nn.Linear(mamba.inner_dim, model.hidden, bias=False)

    def forward(self, x: Tensor, rope: Rope | None = None, starts: Tensor | None = None) -> Tensor:
        """`starts` [b, s]: which tokens begin a document, with a new state."""
        gate, x, b, c, step = self.inputs(x)
        x, b, c, step = self.sequence.gather(x, b, c, step)
        x, b, c = self.conv(x, b, c, sequence=self.sequence, starts=starts)
        b, c = (torch.unflatten(one, -1, (-1, self.state_dim)) for one in (b, c))
        of_heads = [self.sequence.own(one) for one in (self.step_bias, self.log_rate, self.skip)]
        forgets = [] if starts is None else [FORGET * at_least_fp32(starts.unsqueeze(-1).to(x.dtype))]
        heads = self.core([torch.unflatten(x, -1, (-1, self.head_dim)), b, c, step, *forgets], of_heads)
        out: Tensor = self.out(self.gated_norm(self.sequence.scatter(heads).flatten(-2), gate))
        return out


class StateSpace(nn.Module):
    """Sequences: x [b, s, heads, p], b and c [b, s, groups, n], step [b, s, heads], and with documents what is added to log
    decays [b, s, 1]; parameters: step_bias, log_rate and skip [heads] -> like x.

    Computed in fp32: decays over a chunk are exponentials of sums.
    """

    def __init__(self, min_step: float) -> None:
        super().__init__()
        self.min_step = min_step

    def forward(self, sequences: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
        return in_segments(self.compute, sequences, parameters)

    def compute(self, x: Tensor, b: Tensor, c: Tensor, step: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        *forgets, step_bias, log_rate, skip, state = others
        step = F.softplus(at_least_fp32(step) + at_least_fp32(step_bias)).clamp(min=self.min_step)
        log_decay = sum(forgets, -at_least_fp32(log_rate).exp() * step)
        return state_space(x, b, c, step, log_decay, at_least_fp32(skip), state)


class GatedGroupNorm(nn.Module):
    """x · silu(gate), over the root of its mean square in each group of channels, times a weight."""

    def __init__(self, width: int, group: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.group, self.eps = group, eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return in_segments(self.compute, (x, gate), (self.weight,))

    def compute(self, x: Tensor, gate: Tensor, weight: Tensor, state: None) -> tuple[Tensor, None]:
        gated = torch.unflatten(at_least_fp32(x) * F.silu(at_least_fp32(gate)), -1, (-1, self.group))
        unit = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.eps)
        return (unit.flatten(-2) * at_least_fp32(weight)).to(x.dtype), None


Compute = Callable[..., tuple[Tensor, Tensor | None]]
"""of a segment of each sequence, of the parameters, and of the state that the last segment left (None: of the first) -> like
the first sequence, and a state"""


def in_segments(compute: Compute, sequences: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """`compute` of segments of sequences [b, s, …], one after the other.

    These and the states between segments are saved: backward computes each segment again, so that the intermediate tensors of
    one are live at a time.
    """
    out: Tensor = _InSegments.apply(compute, len(sequences), *sequences, *parameters)  # type: ignore[no-untyped-call]
    return out


class _InSegments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Compute, count: int, *inputs: Tensor) -> Tensor:
        sequences, parameters = inputs[:count], inputs[count:]
        out, states, state = torch.empty_like(sequences[0]), list[Tensor](), None
        for part, *segment in zip(*(torch.split(one, SEGMENT, 1) for one in (out, *sequences)), strict=True):
            states += [] if state is None else [state]
            values, state = compute(*segment, *parameters, state)
            part.copy_(values)
        ctx.compute, ctx.count = compute, count
        ctx.save_for_backward(*inputs, *states)
        ctx.inputs = len(inputs)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, count = ctx.saved_tensors, ctx.count
        inputs, states = saved[: ctx.inputs], saved[ctx.inputs :]
        sequences = [torch.empty_like(one) for one in inputs[:count]]
        parameters = [torch.zeros_like(at_least_fp32(one)) for one in inputs[count:]]
        segments = [*zip(*(torch.split(one, SEGMENT, 1) for one in (*inputs[:count], *sequences, grad)), strict=True)]
        to_state: Tensor | None = None
        for number in reversed(range(len(segments))):
            segment, found, given = segments[number][:count], segments[number][count:-1], segments[number][-1]
            state = states[number - 1] if number and states else None
            with torch.enable_grad():
                leaves = [one.detach().requires_grad_() for one in (*segment, *inputs[count:], state) if one is not None]
                results = ctx.compute(*leaves, *([None] if state is None else []))
                # Nothing reads the last state.
                read = 1 if to_state is None else 2
                gradients = torch.autograd.grad(results[:read], leaves, (given, to_state)[:read])
            for own, one in zip(found, gradients, strict=False):
                own.copy_(one)
            for own, one in zip(parameters, gradients[count:], strict=False):
                own.add_(one)
            to_state = gradients[-1] if state is not None else None
            del results, leaves, gradients, one
        return (None, None, *sequences, *(own.to(one.dtype) for own, one in zip(parameters, inputs[count:], strict=True)))


def state_space(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    step: Tensor,
    log_decay: Tensor,
    skip: Tensor,
    state: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """log_decay like step, the rest as StateSpace has it, with the step's final values; state [b, groups, n, heads, p] before
    and after.
    """
    batch, length, heads, width = x.shape
    groups, states = b.shape[2:]
    each, wide = heads // groups, at_least_fp32(x)
    # [batch · chunks · groups, heads of a group, tokens, …], contiguous; padding has step 0, which changes no state.
    written, read = (_chunks(at_least_fp32(one).unsqueeze(3), chunk).squeeze(1) for one in (b, c))
    values = _chunks(torch.unflatten(wide * step.unsqueeze(-1), 2, (groups, each)), chunk)
    total = _chunks(torch.unflatten(log_decay, 2, (groups, each)).unsqueeze(-1), chunk).squeeze(-1).cumsum(-1)
    if state is None:
        state = wide.new_zeros(batch, groups, states, each, width)
    carried, state = _carried(written, read, values, total, state)
    within = _within(written, read, values, total).transpose(1, 2)
    out = torch.addcmul(within, carried, total.exp().mT.unsqueeze(-1))
    del within, carried, values
    out = out.view(batch, -1, groups, chunk, each, width).transpose(2, 3).reshape(batch, -1, heads, width)
    return torch.addcmul(out[:, :length], skip.unsqueeze(-1), wide).to(x.dtype), state


def _within(written: Tensor, read: Tensor, values: Tensor, total: Tensor) -> Tensor:
    """What tokens read of others in their chunk: [n, heads, tokens, p]."""
    tokens = values.shape[2]
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=values.device).triu_(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill_(later, -math.inf).exp_()
    return ((read @ written.mT).unsqueeze(1) * between) @ values


def _carried(written: Tensor, read: Tensor, values: Tensor, total: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """What they read of the state before their chunk, without its decay since then: [n, tokens, heads, p]; the last state."""
    batch, groups, states, heads, width = state.shape
    kept = (values * (total[..., -1:] - total).exp().unsqueeze(-1)).transpose(1, 2).flatten(2)
    updates = (written.mT @ kept).view(batch, -1, groups, states, heads, width)
    decays = total[..., -1].exp().view(batch, -1, groups, 1, heads, 1)
    before = []
    for update, decay in zip(updates.unbind(1), decays.unbind(1), strict=True):
        before.append(state)
        state = torch.addcmul(update, state, decay)
    whole: Tensor = torch.stack(before, 1).view(-1, states, heads * width)
    return torch.unflatten(read @ whole, -1, (heads, width)), state


def initialize(name: str, out: Tensor, generator: torch.Generator) -> Tensor:
    """Initial values of rates, 1 to 16, steps, 0.001 to 0.1, and skips, as the paper's code has them."""
    if name.endswith(".skip"):
        return out.fill_(1)
    if name.endswith(".log_rate"):
        return out.uniform_(1, 16, generator=generator).log_()
    step = out.uniform_(math.log(1e-3), math.log(0.1), generator=generator).exp_()
    return step + torch.log(-torch.expm1(-step))  # whose softplus is the step


def is_initialized_here(name: str) -> bool:
    return name.endswith((".step_bias", ".log_rate", ".skip"))


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """[b, s, groups, heads of a group, n] -> [b · chunks · groups, heads of a group, chunk, n]."""
    batch, length, groups, each, width = x.shape
    padded = F.pad(x, (0, 0, 0, 0, 0, 0, 0, -length % chunk)).reshape(batch, -1, chunk, groups, each, width)
    return padded.permute(0, 1, 3, 4, 2, 5).reshape(-1, each, chunk, width).contiguous()
