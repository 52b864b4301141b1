"""A Triton kernel that casts: ZeRO's shards into an all-gather, gradients into the input of a reduce-scatter, where each rank's
rows are contiguous, and gradients of micro-batches into fp32 sums.

torch's own kernels take twice as long between fp32 and bf16 (benchmarks/gpu/README.md).
"""

# No postponed annotations: Triton reads them.
from collections.abc import Sequence

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

BLOCK, WARPS = 4096, 8


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _copy_rows(gradient, out, size, stride, ADD: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    rank = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(gradient + rank * size + at, mask=at < size).to(out.dtype.element_ty)
    if ADD:
        value += tl.load(out + rank * stride + at, mask=at < size)
    tl.store(out + rank * stride + at, value, mask=at < size)


def fits(gradients: Sequence[torch.Tensor], ranks: int) -> bool:
    """Whether the kernel takes these: contiguous, with as many rows for each rank."""
    return all(one.is_cuda and one.is_contiguous() and len(one) % ranks == 0 for one in gradients)


def chunk_cat(gradients: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """out [ranks, n]: rank r's rows of every gradient, one after the other."""
    ranks, first = len(out), 0
    for gradient in gradients:
        size = gradient.numel() // ranks
        grid = triton.cdiv(size, BLOCK), ranks
        _copy_rows[grid](gradient, out[:, first:], size, out.stride(0), ADD=False, BLOCK=BLOCK, num_warps=WARPS)
        first += size


def copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], add: bool = False) -> None:
    """Casts each contiguous source into its contiguous target, or adds it."""
    for target, source in zip(targets, sources, strict=True):
        size = source.numel()
        if size:
            grid = triton.cdiv(size, BLOCK), 1
            _copy_rows[grid](source, target, size, size, ADD=add, BLOCK=BLOCK, num_warps=WARPS)
