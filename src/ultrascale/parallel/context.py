"""Context parallelism: each rank holds a slice of the sequence; attention gets keys and values from the other ranks.

Four variants, for causal attention:

- `allgather`: gathers all keys and values at once; each rank attends to those before its own.
- `ring`: sends keys and values around a ring, one slice per step (Liu et al. 2023), overlapped with attention over the slice
  received before. The causal mask leaves one slice to rank 0 and all of them to the last rank.
- `zigzag`: the same ring, but rank r holds slices r and 2·cp − 1 − r, so that all ranks have equal work.
- `ulysses`: an all-to-all reshards from sequence to heads, and another one back (Jacobs et al. 2023). So do linear attention
  and Mamba-2 under every variant: their states go through the whole sequence.

The first three compute attention in tiles of queries and keys, merged by their log-sum-exp in fp32, and save for backward
only this rank's q, k, v, output and log-sum-exp: backward fetches the other ranks' keys and values again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ultrascale.kernels import fused
from ultrascale.model.attention import Gradients, TileAttention, add_sinks, padded, sinks_gradient
from ultrascale.model.latent_attention import LatentAttention
from ultrascale.model.linear_attention import GatedDeltaNet, SequenceOfHeads
from ultrascale.model.mamba import Mamba2Mixer
from ultrascale.model.operators import at_least_fp32
from ultrascale.model.self_attention import Attention, CausalAttention
from ultrascale.parallel import comm
from ultrascale.parallel.comm import Axis, switch
from ultrascale.specs.errors import SpecError
from ultrascale.specs.layout import ContextParallel

ALL = slice(None)


def positions(seq: int, axis: Axis, variant: ContextParallel) -> Tensor:
    """[seq / cp]: the positions of this rank's tokens in the whole sequence."""
    if variant == "zigzag" and axis.size > 1:
        slices = torch.unflatten(torch.arange(seq), 0, (2 * axis.size, -1))
        return torch.cat([slices[axis.rank], slices[2 * axis.size - 1 - axis.rank]])
    return torch.unflatten(torch.arange(seq), 0, (axis.size, -1))[axis.rank]


def apply(model: nn.Module, axis: Axis, variant: ContextParallel, seq: int | None = None) -> None:
    """Replaces the core of every attention layer. A sliding window at least as long as `seq` is ignored.

    Linear attention and Mamba-2 get whole sequences of a part of the heads, whatever the variant.
    """
    if axis.size == 1:
        return
    model.context_ranks = axis.size  # type: ignore[assignment]  # rotary scaling may depend on the whole length
    for block in cast(nn.ModuleDict, model.blocks).values():
        if isinstance(block.attention, GatedDeltaNet | Mamba2Mixer):
            block.attention.sequence = SwitchedHeads(axis, variant)
        if not isinstance(block.attention, Attention | LatentAttention):
            continue
        attention, core = block.attention, block.attention.core
        if core.sliding_window is not None and seq is not None and core.sliding_window >= seq:
            core.sliding_window = None
        attention.core = cast(CausalAttention, ContextCore(axis, variant, core))


class SwitchedHeads(SequenceOfHeads):
    """An all-to-all from slices of the sequence to parts of the heads, and another one back."""

    def __init__(self, axis: Axis, variant: ContextParallel) -> None:
        self.axis = axis
        last = 2 * axis.size - 1
        self.held = [half for rank in range(axis.size) for half in (rank, last - rank)] if variant == "zigzag" else None
        """which halves of slices the ranks hold, one after the other; None: in order"""

    def gather(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        parts = [torch.unflatten(one, -1, (self.axis.size, -1)) for one in inputs]
        whole = switch(torch.cat(parts, -1).flatten(-2), self.axis, split_dim=2, concat_dim=1)
        if self.held is not None:
            halves = whole.chunk(len(self.held), 1)
            whole = torch.cat([halves[self.held.index(half)] for half in range(len(halves))], 1)
        return torch.split(whole, [part.shape[-1] for part in parts], -1)

    def scatter(self, heads: Tensor) -> Tensor:
        if self.held is not None:
            halves = heads.chunk(len(self.held), 1)
            heads = torch.cat([halves[half] for half in self.held], 1)
        return switch(heads, self.axis, split_dim=1, concat_dim=2)

    def own(self, parameter: Tensor) -> Tensor:
        return parameter.chunk(self.axis.size)[self.axis.rank]


class ContextCore(nn.Module):
    """Causal attention over a sequence sharded over cp: q [b, s/cp, heads, d], k and v [b, s/cp, kv_heads, …] -> like q, as
    wide as v.
    """

    def __init__(self, axis: Axis, variant: ContextParallel, core: CausalAttention) -> None:
        super().__init__()
        if variant != "ulysses" and (core.sliding_window is not None or core.softcap is not None):
            what = (
                f"a sliding window of {core.sliding_window} tokens, shorter than the sequence,"
                if core.sliding_window
                else (f"attention scores capped at {core.softcap:g},")
            )
            raise SpecError(
                f"layout.context_parallel is {variant} but the model has {what} which only ulysses can cut: try "
                "context_parallel=ulysses or cp=1"
            )
        self.axis = axis
        self.variant: ContextParallel = variant
        self.attend: CausalAttention | TileAttention
        self.attend = core if variant == "ulysses" else TileAttention(core.scale)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        if isinstance(self.attend, CausalAttention):
            return _ulysses(q, k, v, self.axis, self.attend, sinks)
        values = padded(v, q.shape[-1])
        out: Tensor = _TiledAttention.apply(q, k, values, sinks, self.axis, self.variant, self.attend)  # type: ignore[no-untyped-call]
        return out[..., : v.shape[-1]]


def _ulysses(q: Tensor, k: Tensor, v: Tensor, axis: Axis, core: CausalAttention, sinks: Tensor | None) -> Tensor:
    copies = max(1, axis.size // k.shape[2])
    if copies > 1:  # fewer kv heads than ranks: neighbouring ranks read the same one
        k, v = (x.repeat_interleave(copies, dim=2) for x in (k, v))
    q, k, v = (switch(x, axis, split_dim=2, concat_dim=1) for x in (q, k, v))
    own_sinks = None if sinks is None else sinks.chunk(axis.size)[axis.rank]  # of the heads that this rank has got
    return switch(core(q, k, v, sinks=own_sinks), axis, split_dim=1, concat_dim=2)


@dataclass(frozen=True)
class AttentionTile:
    """The range of a rank's queries (`rows`) that attends to a range of another rank's keys."""

    rows: slice
    keys: slice
    causal: bool


DIAGONAL_TILE = AttentionTile(ALL, ALL, causal=True)
"""A rank's queries and its own keys; for zigzag too, because the rank's second slice is later than its first."""


def visible(variant: ContextParallel, rank: int, owner: int, length: int) -> AttentionTile | None:
    """The tile of `owner`'s keys that the causal mask leaves to the queries of `rank`; each rank holds `length` tokens."""
    if owner == rank:
        return DIAGONAL_TILE
    if variant == "zigzag":
        first, second = slice(0, length // 2), slice(length // 2, length)
        return AttentionTile(ALL, first, causal=False) if owner < rank else AttentionTile(second, ALL, causal=False)
    return AttentionTile(ALL, ALL, causal=False) if owner < rank else None


class _OnlineSoftmax:
    """The attention output over the keys processed so far and its log-sum-exp, in fp32 or wider."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        # Copies: selective recomputation saves what attention returned, and `add` writes into these.
        self.out = out.to(torch.promote_types(out.dtype, torch.float32), copy=True)
        self.lse = lse.clone()

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        fused.merge_attention_(self.out[:, rows], self.lse[:, :, rows], out, lse)


@dataclass(frozen=True)
class _SavedTensors:
    """Saved tensors of this rank: the gradient of each tile needs the merged output and log-sum-exp."""

    attend: TileAttention
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    grad_out: Tensor

    def backward(self, tile: AttentionTile, k: Tensor, v: Tensor) -> Gradients:
        rows = tile.rows
        keys, values = k[:, tile.keys], v[:, tile.keys]
        merged = self.out[:, rows], self.lse[:, :, rows].contiguous()
        return self.attend.gradients(self.grad_out[:, rows], self.q[:, rows], keys, values, *merged, tile.causal)


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        axis: Axis,
        variant: ContextParallel,
        attend: TileAttention,
    ) -> Tensor:
        gathers = variant == "allgather"
        merged = _gathered_forward(attend, q, k, v, axis) if gathers else _ring_forward(attend, q, k, v, axis, variant)
        out, lse = merged.out.to(q.dtype), merged.lse
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.axis, ctx.variant, ctx.attend = axis, variant, attend
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        to_sinks = None if sinks is None else sinks_gradient(grad_out, out, lse, sinks)
        saved = _SavedTensors(ctx.attend, q, k, v, out, lse, grad_out.contiguous())
        if ctx.variant == "allgather":
            return *_gathered_backward(saved, ctx.axis), to_sinks, None, None, None
        return *_ring_backward(saved, ctx.axis, ctx.variant), to_sinks, None, None, None


def _gathered_forward(attend: TileAttention, q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> _OnlineSoftmax:
    pending = [comm.all_gather_start(x, axis, dim=1) for x in (k, v)]
    merged = _OnlineSoftmax(*attend(q, k, v, True))
    keys, values = (x.wait() for x in pending)
    if axis.rank > 0:
        earlier = slice(0, axis.rank * q.shape[1])
        merged.add(ALL, *attend(q, keys[:, earlier], values[:, earlier], False))
    return merged


def _gathered_backward(saved: _SavedTensors, axis: Axis) -> Gradients:
    length = saved.k.shape[1]
    pending = [comm.all_gather_start(x, axis, dim=1) for x in (saved.k, saved.v)]
    dq, *own = saved.backward(DIAGONAL_TILE, saved.k, saved.v)
    keys, values = (x.wait() for x in pending)
    grads = [torch.zeros_like(x) for x in (keys, values)]
    start = axis.rank * length
    for whole, part in zip(grads, own, strict=True):
        whole[:, start : start + length] = part
    if start > 0:
        earlier = slice(0, start)
        more, *before = saved.backward(AttentionTile(ALL, earlier, causal=False), keys, values)
        dq = (at_least_fp32(dq) + more).to(dq.dtype)
        for whole, part in zip(grads, before, strict=True):
            whole[:, earlier] = part
    del pending, keys, values  # together as large as the gradients that are reduce-scattered next
    dk, dv = (x.wait() for x in [comm.reduce_scatter_start(x, axis, dim=1) for x in grads])
    return dq, dk, dv


def _ring_forward(
    attend: TileAttention, q: Tensor, k: Tensor, v: Tensor, axis: Axis, variant: ContextParallel
) -> _OnlineSoftmax:
    pending = comm.shift_start([k, v], axis)
    merged = _OnlineSoftmax(*attend(q, k, v, True))
    for step in range(1, axis.size):
        received = pending.wait()
        if step + 1 < axis.size:
            pending = comm.shift_start(received, axis)
        tile = visible(variant, axis.rank, (axis.rank - step) % axis.size, q.shape[1])
        if tile is not None:
            keys, values = (x[:, tile.keys] for x in received)
            merged.add(tile.rows, *attend(q[:, tile.rows], keys, values, tile.causal))
    return merged


def _ring_backward(saved: _SavedTensors, axis: Axis, variant: ContextParallel) -> Gradients:
    """The sums of dk and dv follow their keys one step behind; after the last step they are one hop from the owner.

    The owner adds its own contribution locally, which saves a hop: sums are sent cp − 1 times, like keys and values. They are
    sent in the dtype of the keys, as a reduce-scatter would send them.
    """
    pending = comm.shift_start([saved.k, saved.v], axis)
    dq, dk, dv = saved.backward(DIAGONAL_TILE, saved.k, saved.v)
    dq = at_least_fp32(dq)
    received, sums = pending.wait(), list[Tensor]()
    for step in range(1, axis.size):
        forwarded = received if step + 1 < axis.size else []
        pending = comm.shift_start([*forwarded, *sums], axis)
        tile = visible(variant, axis.rank, (axis.rank - step) % axis.size, saved.q.shape[1])
        grads = saved.backward(tile, *received) if tile is not None else None
        shifted = pending.wait()
        sums = shifted[len(forwarded) :] or [torch.zeros_like(x) for x in received]
        received = shifted[: len(forwarded)]
        if tile is not None and grads is not None:
            dq[:, tile.rows] += grads[0]
            sums[0][:, tile.keys] += grads[1]
            sums[1][:, tile.keys] += grads[2]
        del grads  # before the next tile's are allocated
    if axis.size > 1:
        total = comm.shift_start(sums, axis).wait()
        dk, dv = dk + total[0], dv + total[1]
    return dq.to(saved.q.dtype), dk, dv
