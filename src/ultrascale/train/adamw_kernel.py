"""AdamW with fp32 masters in one Triton kernel: one pass over gradient, master and moments writes all that changes.

The gradient is read in the format it has and scaled on the way (clipping, fp16's loss scale), and the copy that computes is
written with its master. Each number is read and written once: 28 bytes a parameter with gradients in bf16, where scaling,
torch's fused AdamW and a copy move 42.
"""

# No postponed annotations: Triton reads them.
import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

BLOCK, WARPS = 1024, 4


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _step(  # type: ignore[no-untyped-def]
    master, gradient, mean, square, copy, size, factor, rate, decay, beta1, rest1, beta2, rest2, eps, whole1, whole2,
    COPIED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(gradient + at, mask=inside).to(tl.float32) * factor
    m = tl.load(mean + at, mask=inside)
    v = tl.load(square + at, mask=inside)
    w = tl.load(master + at, mask=inside)
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    w = w * (1 - rate * decay) - rate / whole1 * m / (tl.sqrt(v / whole2) + eps)
    tl.store(mean + at, m, mask=inside)
    tl.store(square + at, v, mask=inside)
    tl.store(master + at, w, mask=inside)
    if COPIED:
        tl.store(copy + at, w.to(copy.dtype.element_ty), mask=inside)


def step(
    master: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    copy: torch.Tensor | None,
    *,
    factor: float,
    rate: float,
    decay: float,
    betas: tuple[float, float],
    eps: float,
    updates: int,
) -> None:
    """One update of a weight, its moments and its copy, all contiguous; `updates`: this one counted in."""
    size, (beta1, beta2) = master.numel(), betas
    if not size:
        return
    _step[(triton.cdiv(size, BLOCK),)](
        master, gradient, mean, square, master if copy is None else copy, size, factor, rate, decay,
        beta1, 1 - beta1, beta2, 1 - beta2, eps, 1 - beta1**updates, 1 - beta2**updates,
        COPIED=copy is not None, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
