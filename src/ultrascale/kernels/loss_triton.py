"""Triton kernels of the chunked loss: softmax, loss and gradient in one, written over the logits; and a scaling that rounds.

One program has one row of logits: it reads it once for the maximum and the sum, and once more to write the gradient. The plain
twins stand in kernels/loss.py, what each bought in docs/kernels/loss.md.
"""

# No postponed annotations: Triton reads them.
import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from ultrascale.model.transformer import IGNORED

BLOCK, WARPS = 4096, 4  # numbers of a row at a time, and the warps that share them


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _row(logits, targets, losses, ignored, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * COLUMNS
    target = tl.load(targets + row)
    counts = target != ignored
    own = tl.load(start + tl.where(counts, target, 0)).to(tl.float32)
    offsets = tl.arange(0, BLOCK)
    top = -float("inf")
    total = 0.0
    for begin in range(0, COLUMNS, BLOCK):
        inside = begin + offsets < COLUMNS
        scores = tl.load(start + begin + offsets, mask=inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(scores, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(scores - higher), 0)
        top = higher
    log_sum = top + tl.log(total)
    tl.store(losses + row, tl.where(counts, log_sum - own, 0.0))
    for begin in range(0, COLUMNS, BLOCK):
        inside = begin + offsets < COLUMNS
        scores = tl.load(start + begin + offsets, mask=inside, other=-float("inf")).to(tl.float32)
        gradient = tl.exp(scores - log_sum) - tl.where(begin + offsets == target, 1.0, 0.0)
        tl.store(start + begin + offsets, tl.where(counts, gradient, 0.0).to(logits.dtype.element_ty), mask=inside)


def loss_and_gradient_(logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor) -> None:
    """logits [n, v] become the gradient of the summed loss; losses [n] are written."""
    rows, columns = logits.shape
    _row[(rows,)](logits, targets, losses, IGNORED, COLUMNS=columns, BLOCK=BLOCK, num_warps=WARPS)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _scale(source, target, factor, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    scaled = tl.load(source + at, mask=inside) * tl.load(factor)
    tl.store(target + at, scaled.to(target.dtype.element_ty), mask=inside)


def scaled(x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x · factor rounded to `dtype`, in one pass: torch's product of two formats takes 2.6 times as long."""
    target = torch.empty(x.shape, dtype=dtype, device=x.device)
    _scale[(triton.cdiv(x.numel(), 2048),)](x, target, factor, x.numel(), BLOCK=2048)
    return target
