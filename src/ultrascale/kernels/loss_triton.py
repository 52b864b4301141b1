"""Triton kernels of the chunked loss: softmax, loss and gradient in one, in place of the logits; and a scaling that rounds.

One program has one row of logits: it reads it once for the maximum and the sum, and again to write the gradient. Where the
vocabulary is cut, these are two kernels, with an all-gather of each row's sums between them; in fp8, tiles write the gradient
both transposed and not. The plain implementations are in kernels/loss.py and kernels/float8.py, the
gain of each in docs/kernels/loss.md.
"""

# No postponed annotations: Triton reads them.
import math

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from ultrascale.model.transformer import IGNORE_INDEX

BLOCK, WARPS = 4096, 4  # elements of a row at a time, and the warps that process them
ROWS, COLUMNS, TILE_WARPS = 32, 128, 4  # of a tile


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _log_sum_exp(start, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.arange(0, BLOCK)
    top = -float("inf")
    total = 0.0
    for begin in range(0, COLUMNS, BLOCK):
        inside = begin + offsets < COLUMNS
        scores = tl.load(start + begin + offsets, mask=inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(scores, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(scores - higher), 0)
        top = higher
    return top + tl.log(total)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _to_gradient(start, log_sum, target, counts, Z: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.arange(0, BLOCK)
    for begin in range(0, COLUMNS, BLOCK):
        inside = begin + offsets < COLUMNS
        scores = tl.load(start + begin + offsets, mask=inside, other=-float("inf")).to(tl.float32)
        gradient = tl.exp(scores - log_sum)
        if Z > 0:
            gradient *= 1 + 2 * Z * log_sum
        gradient -= tl.where(begin + offsets == target, 1.0, 0.0)
        tl.store(start + begin + offsets, tl.where(counts, gradient, 0.0).to(start.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _store_losses(losses, row, log_sum, own, counts, Z: tl.constexpr):  # type: ignore[no-untyped-def]
    if Z > 0:
        tl.store(losses + 2 * row, tl.where(counts, log_sum - own, 0.0))
        tl.store(losses + 2 * row + 1, tl.where(counts, Z * log_sum * log_sum, 0.0))
    else:
        tl.store(losses + row, tl.where(counts, log_sum - own, 0.0))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _row(  # type: ignore[no-untyped-def]
    logits, targets, losses, sums, factor, ignored,
    Z: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, OVER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * COLUMNS
    target = tl.load(targets + row)
    counts = target != ignored
    own = tl.load(start + tl.where(counts, target, 0)).to(tl.float32)
    log_sum = _log_sum_exp(start, COLUMNS, BLOCK)
    _store_losses(losses, row, log_sum, own, counts, Z)
    if OVER:
        _to_gradient(start, log_sum, target, counts, Z, COLUMNS, BLOCK)
    else:
        if Z > 0:
            factor *= 1 + 2 * Z * log_sum
        tl.store(sums + row, tl.where(counts, log_sum - tl.log(factor), float("inf")))


def loss_and_gradient_(logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor, z_loss: float = 0.0) -> None:
    """Overwrites logits [n, v] with the gradient of the summed losses; writes losses [n], or with z-loss [n, 2]."""
    rows, columns = logits.shape
    _row[(rows,)](
        logits, targets, losses, losses, 1.0, IGNORE_INDEX,
        Z=z_loss, COLUMNS=columns, BLOCK=BLOCK, OVER=True, num_warps=WARPS,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _shard_statistics(  # type: ignore[no-untyped-def]
    logits, targets, statistics, first, rows, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * COLUMNS
    target = tl.load(targets + row) - first
    here = (target >= 0) & (target < COLUMNS)
    own = tl.load(start + tl.where(here, target, 0)).to(tl.float32)
    tl.store(statistics + row, _log_sum_exp(start, COLUMNS, BLOCK))
    tl.store(statistics + rows + row, tl.where(here, own, 0.0))


def shard_statistics(logits: torch.Tensor, targets: torch.Tensor, first: int) -> torch.Tensor:
    """[2, n]: log-sum-exp of logits [n, v], columns of a vocabulary from `first` on, and the target's logit, 0 if not here."""
    rows, columns = logits.shape
    statistics = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    _shard_statistics[(rows,)](logits, targets, statistics, first, rows, COLUMNS=columns, BLOCK=BLOCK, num_warps=WARPS)
    return statistics


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _shard_gradient(  # type: ignore[no-untyped-def]
    logits, targets, losses, statistics, first, rows, shards, ignored,
    Z: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, SHARDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    counts = target != ignored
    shard = tl.arange(0, SHARDS)
    sums = tl.load(statistics + shard * 2 * rows + row, mask=shard < shards, other=-float("inf"))
    own = tl.sum(tl.load(statistics + (shard * 2 + 1) * rows + row, mask=shard < shards, other=0.0), 0)
    top = tl.max(sums, 0)
    log_sum = top + tl.log(tl.sum(tl.exp(sums - top), 0))
    _store_losses(losses, row, log_sum, own, counts, Z)
    _to_gradient(logits + row * COLUMNS, log_sum, target - first, counts, Z, COLUMNS, BLOCK)


def shard_gradient_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    first: int,
    statistics: torch.Tensor,
    losses: torch.Tensor,
    z_loss: float = 0.0,
) -> None:
    """The same for logits [n, v], columns of a vocabulary from `first` on.

    statistics [shards, 2, n]: what `shard_statistics` found in all columns.
    """
    rows, columns = logits.shape
    shards = len(statistics)
    _shard_gradient[(rows,)](
        logits, targets, losses, statistics, first, rows, shards, IGNORE_INDEX,
        Z=z_loss, COLUMNS=columns, BLOCK=BLOCK, SHARDS=triton.next_power_of_2(shards), num_warps=WARPS,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _softmax_tile(  # type: ignore[no-untyped-def]
    logits, targets, sums, out, transposed, factors, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    down = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    across = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (down < rows) & (across < columns)
    here = down.to(tl.int64) * columns + across
    scores = tl.load(logits + here, mask=inside, other=0.0).to(tl.float32)
    target = tl.load(targets + down, mask=down < rows, other=0).to(tl.int32)
    log_sum = tl.load(sums + down, mask=down < rows, other=0.0)  # minus log(factor); infinite if the target is ignored
    shares = tl.exp(scores - log_sum)
    own = tl.where(across == target, tl.load(factors), 0.0)
    tl.store(out + here, (shares - own).to(out.dtype.element_ty), mask=inside)
    # Converted twice, with a factor that is loaded twice: see kernels/float8_triton.py.
    own = tl.where(across == target, tl.load(factors, volatile=True), 0.0)
    narrow = (shares - own).to(transposed.dtype.element_ty)
    tl.store(transposed + across.trans().to(tl.int64) * stride + down.trans(), narrow.trans(), mask=inside.trans())


def loss_and_scaled_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    losses: torch.Tensor,
    factor: float,
    transposed: torch.Tensor,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """The gradient of the summed losses of logits [n, v], times `factor`, in the dtype of `transposed`; writes the losses.

    `transposed`: columns [v, n] of a matrix, to which the gradient is written transposed.
    """
    rows, columns = logits.shape
    sums = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _row[(rows,)](
        logits, targets, losses, sums, factor, IGNORE_INDEX,
        Z=z_loss, COLUMNS=columns, BLOCK=BLOCK, OVER=False, num_warps=WARPS,
    )  # fmt: skip
    return _scaled_tiles(logits, targets, sums, factor, transposed)


def scaled_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    log_sum: torch.Tensor,
    counts: torch.Tensor,
    factor: float,
    transposed: torch.Tensor,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """The same of logits [n, v], columns of a vocabulary, from the log-sum-exp of all its columns and which targets count.

    Targets are columns of these logits; others are in other columns.
    """
    own = log_sum - math.log(factor)
    sums = torch.where(counts, own - torch.log1p(2 * z_loss * log_sum) if z_loss else own, math.inf)
    return _scaled_tiles(logits, targets, sums, factor, transposed)


def _scaled_tiles(
    logits: torch.Tensor, targets: torch.Tensor, sums: torch.Tensor, factor: float, transposed: torch.Tensor
) -> torch.Tensor:
    """`sums`: log-sum-exp of each row minus log(factor), the z-loss in it; infinite where its target is ignored."""
    rows, columns = logits.shape
    out = torch.empty(logits.shape, dtype=transposed.dtype, device=logits.device)
    _softmax_tile[(triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))](
        logits, targets, sums, out, transposed, torch.full_like(sums[:1], factor), rows, columns, transposed.stride(0),
        ROWS=ROWS, COLUMNS=COLUMNS, num_warps=TILE_WARPS,
    )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _scale(source, target, factor, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    scaled = tl.load(source + at, mask=inside) * tl.load(factor)
    tl.store(target + at, scaled.to(target.dtype.element_ty), mask=inside)


def scaled(x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x · factor rounded to `dtype`, in one pass: torch's multiplication of two dtypes takes 2.6 times as long."""
    target = torch.empty(x.shape, dtype=dtype, device=x.device)
    _scale[(triton.cdiv(x.numel(), 2048),)](x, target, factor, x.numel(), BLOCK=2048)
    return target
