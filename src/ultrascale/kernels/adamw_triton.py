"""AdamW with fp32 masters in one Triton kernel, in one pass over gradient, master and moments.

The gradient is read in its dtype and scaled in the kernel (clipping, fp16's loss scale), and the compute copy is written
together with its master. Each value is read and written once: 28 bytes per parameter with bf16 gradients, 26 if the master
shares its upper half with the copy (kernels/split_master.py); scaling, torch's fused AdamW and a copy move 42.
"""

# No postponed annotations: Triton reads them.
from collections.abc import Sequence

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

BLOCK, WARPS = 1024, 4
BLOCKS_PER_PROGRAM = 16  # blocks that one program of the norm sums


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _step(  # type: ignore[no-untyped-def]
    master, gradient, mean, square, copy, now, size, decay, beta1, rest1, beta2, rest2, eps,
    COPIED: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor, rate, whole1, whole2 = tl.load(now), tl.load(now + 1), tl.load(now + 2), tl.load(now + 3)
    inside = at < tl.where(factor == factor, size, 0)  # NaN: nothing is loaded, nothing stored
    g = tl.load(gradient + at, mask=inside).to(tl.float32) * factor
    m = tl.load(mean + at, mask=inside)
    v = tl.load(square + at, mask=inside)
    w = tl.load(master + at, mask=inside)
    if SPLIT:
        w = (tl.load(copy + at, mask=inside).to(tl.int32) << 16) + w.to(tl.int32)
        w = w.to(tl.float32, bitcast=True)
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    w = w * (1 - rate * decay) - rate / whole1 * m / (tl.sqrt(v / whole2) + eps)
    tl.store(mean + at, m, mask=inside)
    tl.store(square + at, v, mask=inside)
    if SPLIT:
        bits = w.to(tl.int32, bitcast=True)
        tl.store(master + at, bits.to(tl.int16), mask=inside)
        tl.store(copy + at, ((bits + 32768) >> 16).to(tl.int16), mask=inside)
    else:
        tl.store(master + at, w, mask=inside)
        if COPIED:
            tl.store(copy + at, w.to(copy.dtype.element_ty), mask=inside)


def step_inputs(rate: float, betas: tuple[float, float], updates: int) -> torch.Tensor:
    """The inputs of the kernel that differ between updates, after the factor of the gradients; `updates` counts this one.

    The kernel reads them from memory, so that a replayed CUDA graph gets the new values.
    """
    return torch.tensor((rate, *(1 - beta**updates for beta in betas)), dtype=torch.float32)


def step(
    master: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    copy: torch.Tensor | None,
    now: torch.Tensor,
    *,
    decay: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """One update of a weight, its moments and its copy, all contiguous; `now`: the factor of the gradients (NaN: no
    update) and the result of `step_inputs`, on the same device.

    An int16 master is the lower half of fp32 values whose upper half is the copy.
    """
    size, (beta1, beta2) = master.numel(), betas
    if not size:
        return
    split = master.dtype == torch.int16
    if split:
        assert copy is not None
        copy = copy.view(torch.int16)
    _step[(triton.cdiv(size, BLOCK),)](
        master, gradient, mean, square, master if copy is None else copy, now, size, decay,
        beta1, 1 - beta1, beta2, 1 - beta2, eps,
        COPIED=copy is not None, SPLIT=split, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _sum_of_squares(gradient, sums, size, BLOCKS_PER_PROGRAM: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0).to(tl.int64)
    at = program * BLOCKS_PER_PROGRAM * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for block in tl.static_range(BLOCKS_PER_PROGRAM):
        g = tl.load(gradient + at + block * BLOCK, mask=at + block * BLOCK < size, other=0.0).to(tl.float32)
        total += g * g
    tl.store(sums + program, tl.sum(total, 0))


def sum_of_squares(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of squares of all elements of contiguous tensors, in fp32 whatever their dtype."""
    programs = [triton.cdiv(gradient.numel(), BLOCKS_PER_PROGRAM * BLOCK) for gradient in gradients]
    sums = torch.empty(sum(programs), dtype=torch.float32, device=gradients[0].device)
    for gradient, part, count in zip(gradients, torch.split(sums, programs), programs, strict=True):
        _sum_of_squares[(count,)](
            gradient, part, gradient.numel(), BLOCKS_PER_PROGRAM=BLOCKS_PER_PROGRAM, BLOCK=BLOCK, num_warps=WARPS
        )
    return sums.sum()
