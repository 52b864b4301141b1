"""Mamba-2 (Dao & Gu 2024): a selective state space in place of attention.

A head's state S [state_dim, head_dim] decays with each token and adds what the token writes: S ← exp(−rate · step) · S +
step · B ⊗ x; the output is CᵀS + skip · x. Heads of a group share B and C. Chunks of tokens are computed by GEMMs (the state
space duality), and each hands its state to the next.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ultrascale.model.linear_attention import CHUNK, FORGET, SequenceOfHeads, ShortConvolution, recomputed
from ultrascale.model.operators import at_least_fp32
from ultrascale.model.rotary import Rope
from ultrascale.model.self_attention import MultiLinear
from ultrascale.specs.blocks import Mamba2
from ultrascale.specs.model import Model


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
        of_heads = map(self.sequence.own, (self.step_bias, self.log_rate, self.skip))
        begins = () if starts is None else (starts.unsqueeze(-1),)
        heads = self.core(torch.unflatten(x, -1, (-1, self.head_dim)), b, c, step, *of_heads, *begins)
        out: Tensor = self.out(self.gated_norm(self.sequence.scatter(heads).flatten(-2), gate))
        return out


class StateSpace(nn.Module):
    """x [b, s, heads, p], b and c [b, s, groups, n], step [b, s, heads], step_bias, log_rate and skip [heads] -> like x.

    With documents also which tokens [b, s, 1] begin one. Computed in fp32: decays over a chunk are exponentials of sums.
    """

    def __init__(self, min_step: float) -> None:
        super().__init__()
        self.min_step = min_step

    def forward(self, *inputs: Tensor) -> Tensor:
        return recomputed(self.compute, *inputs)

    def compute(
        self, x: Tensor, b: Tensor, c: Tensor, step: Tensor, step_bias: Tensor, log_rate: Tensor, skip: Tensor, *starts: Tensor
    ) -> Tensor:
        step = F.softplus(at_least_fp32(step) + at_least_fp32(step_bias)).clamp(min=self.min_step)
        log_decay = -at_least_fp32(log_rate).exp() * step
        for begins in starts:
            log_decay = log_decay.masked_fill(begins, FORGET)
        return state_space(x, b, c, step, log_decay, at_least_fp32(skip))


class GatedGroupNorm(nn.Module):
    """x · silu(gate), over the root of its mean square in each group of channels, times a weight."""

    def __init__(self, width: int, group: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.group, self.eps = group, eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return recomputed(self.compute, x, gate, self.weight)

    def compute(self, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        gated = torch.unflatten(at_least_fp32(x) * F.silu(at_least_fp32(gate)), -1, (-1, self.group))
        unit = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.eps)
        normed: Tensor = (unit.flatten(-2) * at_least_fp32(weight)).to(x.dtype)
        return normed


def state_space(x: Tensor, b: Tensor, c: Tensor, step: Tensor, log_decay: Tensor, skip: Tensor, chunk: int = CHUNK) -> Tensor:
    """log_decay like step, the rest as StateSpace has it, with the step's final values."""
    batch, length, heads, width = x.shape
    groups, states = b.shape[2:]
    each = heads // groups
    # [batch · chunks · groups, tokens, …], contiguous; padding has step 0, which changes no state.
    written, read = (_chunks(at_least_fp32(one).unsqueeze(3), chunk) for one in (b, c))
    values = _chunks(torch.unflatten(at_least_fp32(x) * step.unsqueeze(-1), 2, (groups, each)), chunk)
    logs = _chunks(torch.unflatten(log_decay, 2, (groups, each)).unsqueeze(-1), chunk)

    total = logs.squeeze(-1).cumsum(1).mT  # [n, heads of a group, tokens]
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
    scores = (read.squeeze(2) @ written.squeeze(2).mT).unsqueeze(1) * between
    within = (scores @ values.transpose(1, 2)).transpose(1, 2)
    kept = values * (total[..., -1:] - total).exp().mT.unsqueeze(-1)
    updates = written.squeeze(2).mT @ kept.flatten(2)

    by_chunk = updates.view(batch, -1, groups, states, each, width)
    decays = total[..., -1].exp().view(batch, -1, groups, 1, each, 1)
    state = torch.zeros_like(by_chunk[:, 0])
    before = [state]
    for update, decay in zip(by_chunk.unbind(1)[:-1], decays.unbind(1), strict=False):
        state = torch.addcmul(update, state, decay)
        before.append(state)
    carried = read.squeeze(2) @ torch.stack(before, 1).view_as(updates)
    out = within + carried.view_as(within) * total.exp().mT.unsqueeze(-1)
    whole = out.view(batch, -1, groups, chunk, each, width).transpose(2, 3).reshape(batch, -1, heads, width)
    return (whole[:, :length] + skip.unsqueeze(-1) * x).to(x.dtype)


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
    """[b, s, groups, heads of a group, n] -> [b · chunks · groups, chunk, heads of a group, n]."""
    batch, length, groups, each, width = x.shape
    padded = F.pad(x, (0, 0, 0, 0, 0, 0, 0, -length % chunk)).view(batch, -1, chunk, groups, each, width)
    return padded.transpose(2, 3).reshape(-1, chunk, each, width)
