"""AdamW with fp32 masters in one Triton kernel for all weights, in one pass over gradient, master and moments.

The gradient is read in its dtype and scaled in the kernel (clipping, fp16's loss scale), and the compute copy is written
together with its master. Each value is read and written once: 28 bytes per parameter with bf16 gradients, 26 if the master
shares its upper half with the copy (kernels/split_master.py); scaling, torch's fused AdamW and a copy move 42.
"""

# No postponed annotations: Triton reads them.
import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

BLOCK, WARPS = 1024, 4
STEP_BLOCKS, NORM_BLOCKS = 2, 16  # of one program, all of one tensor
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.int16: tl.int16}


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _update(  # type: ignore[no-untyped-def]
    master, gradient, mean, square, copy, now, at, inside, decay, lr_scale, beta1, rest1, beta2, rest2, eps,
    COPIED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    factor, rate, whole1, whole2 = tl.load(now), tl.load(now + 1) * lr_scale, tl.load(now + 2), tl.load(now + 3)
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


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _pointer(addresses, at, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    found = tl.load(addresses + at).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _step(  # type: ignore[no-untyped-def]
    addresses, tensors, starts, sizes, decays, lr_scales, now, count, beta1, rest1, beta2, rest2, eps,
    MASTER: tl.constexpr, GRADIENT: tl.constexpr, COPY: tl.constexpr, COPIED: tl.constexpr, SPLIT: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`addresses`: of masters, gradients, means, squares and copies, `count` each."""
    tensor = tl.load(tensors + tl.program_id(0))
    first = tl.multiple_of(tl.load(starts + tl.program_id(0)), BLOCK)
    master = _pointer(addresses, tensor, MASTER, ALIGNED)
    gradient = _pointer(addresses, count + tensor, GRADIENT, ALIGNED)
    mean = _pointer(addresses, 2 * count + tensor, tl.float32, ALIGNED)
    square = _pointer(addresses, 3 * count + tensor, tl.float32, ALIGNED)
    copy = _pointer(addresses, 4 * count + tensor, COPY, ALIGNED)
    factor = tl.load(now)
    size = tl.where(factor == factor, tl.load(sizes + tensor), 0)  # NaN: nothing is loaded, nothing stored
    decay, lr_scale = tl.load(decays + tensor), tl.load(lr_scales + tensor)
    if first + BLOCKS * BLOCK <= size:  # without a mask, whose bound the compiler does not know: loads are vectors
        for block in tl.static_range(BLOCKS):
            at = first + block * BLOCK + tl.arange(0, BLOCK)
            _update(
                master, gradient, mean, square, copy, now, at, None, decay, lr_scale, beta1, rest1, beta2, rest2, eps,
                COPIED=COPIED, SPLIT=SPLIT,
            )  # fmt: skip
    else:
        for block in tl.static_range(BLOCKS):
            at = first + block * BLOCK + tl.arange(0, BLOCK)
            _update(
                master, gradient, mean, square, copy, now, at, at < size, decay, lr_scale, beta1, rest1, beta2, rest2, eps,
                COPIED=COPIED, SPLIT=SPLIT,
            )  # fmt: skip


class AdamWTensors(NamedTuple):
    """One weight's tensors, all contiguous. An int16 master is the lower half of fp32 values whose upper half is the copy."""

    master: torch.Tensor
    gradient: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor
    copy: torch.Tensor | None
    decay: float
    lr_scale: float = 1.0


def step_inputs(rate: float, betas: tuple[float, float], updates: int) -> torch.Tensor:
    """The inputs of the kernel that differ between updates, after the factor of the gradients; `updates` counts this one.

    The kernel reads them from memory, so that a replayed CUDA graph gets the new values.
    """
    return torch.tensor((rate, *(1 - beta**updates for beta in betas)), dtype=torch.float32)


class ProgramTable(NamedTuple):
    """The work of each program of a kernel over many tensors."""

    tensors: torch.Tensor
    """whose elements it computes"""
    starts: torch.Tensor
    """its first element"""
    sizes: torch.Tensor
    """of all tensors"""


@lru_cache(maxsize=64)
def _programs(sizes: tuple[int, ...], blocks: int, device: torch.device) -> ProgramTable:
    elements = blocks * BLOCK
    counts = torch.tensor([triton.cdiv(size, elements) for size in sizes])
    tensors = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    starts = (torch.arange(len(tensors)) - (counts.cumsum(0) - counts)[tensors]) * elements
    return ProgramTable(tensors.to(device), starts.to(device), torch.tensor(sizes).to(device))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _sum_of_squares(  # type: ignore[no-untyped-def]
    addresses, tensors, starts, sizes, sums,
    GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tensor = tl.load(tensors + program)
    first, size = tl.multiple_of(tl.load(starts + program), BLOCK), tl.load(sizes + tensor)
    gradient = _pointer(addresses, tensor, GRADIENT, ALIGNED)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if first + BLOCKS * BLOCK <= size:
        for block in tl.static_range(BLOCKS):
            g = tl.load(gradient + first + block * BLOCK + tl.arange(0, BLOCK)).to(tl.float32)
            total += g * g
    else:
        for block in tl.static_range(BLOCKS):
            at = first + block * BLOCK + tl.arange(0, BLOCK)
            g = tl.load(gradient + at, mask=at < size, other=0.0).to(tl.float32)
            total += g * g
    tl.store(sums + program, tl.sum(total, 0))


class AddressTable:
    """Addresses of tensors on the device, for kernels over many of them.

    Its buffers stay, so that a CUDA graph can be captured with the copy: a replay copies the addresses of the capture.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._host = torch.empty(count, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.empty(count, dtype=torch.int64, device=device)
        self._copied: torch.cuda.Event | None = None

    def copy(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, bool]:
        """The addresses, and whether all are multiples of 16 bytes."""
        capturing = self._device.is_cuda and torch.cuda.is_current_stream_capturing()  # which has waited for all work
        if self._copied is not None and not capturing:
            self._copied.synchronize()
        found = [tensor.data_ptr() for tensor in tensors]
        self._host.copy_(torch.tensor(found))
        self._device.copy_(self._host, non_blocking=True)
        if self._device.is_cuda and not capturing:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        return self._device, not any(address % 16 for address in found)


class MultiTensorAdamW:
    """AdamW and the gradient's norm for many weights, in one launch for all of the same formats."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tables: dict[tuple[object, ...], AddressTable] = {}

    def _addresses(self, key: tuple[object, ...], tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, bool]:
        if key not in self._tables:
            self._tables[key] = AddressTable(len(tensors), self.device)
        return self._tables[key].copy(tensors)

    def sum_of_squares(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum of squares of all elements of contiguous tensors, in fp32 whatever their dtype."""
        found = []
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            group = [gradient for gradient in gradients if gradient.dtype == dtype]
            programs = _programs(tuple(gradient.numel() for gradient in group), NORM_BLOCKS, self.device)
            sums = torch.empty(len(programs.tensors), dtype=torch.float32, device=self.device)
            addresses, aligned = self._addresses(("norm", dtype, len(group)), group)
            _sum_of_squares[(len(sums),)](
                addresses, *programs, sums,
                GRADIENT=DTYPES[dtype], ALIGNED=aligned, BLOCKS=NORM_BLOCKS, BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip
            found.append(sums.sum())
        return torch.stack(found).sum()

    def step(self, weights: Sequence[AdamWTensors], now: torch.Tensor, betas: tuple[float, float], eps: float) -> None:
        """One update of weights, moments and copies; `now`: the factor of the gradients (NaN: no update) and `step_inputs`."""
        groups: dict[tuple[torch.dtype, torch.dtype, torch.dtype | None], list[AdamWTensors]] = {}
        for one in weights:
            if one.master.numel():
                formats = one.master.dtype, one.gradient.dtype, None if one.copy is None else one.copy.dtype
                groups.setdefault(formats, []).append(one)
        for formats, group in groups.items():
            (master, gradient, copy), split = formats, formats[0] == torch.int16
            programs = _programs(tuple(one.master.numel() for one in group), STEP_BLOCKS, self.device)
            copies = [one.master if one.copy is None else one.copy for one in group]
            own = zip(*((one.master, one.gradient, one.mean, one.square) for one in group), strict=True)
            tensors = [*itertools.chain(*own), *copies]
            addresses, aligned = self._addresses((*formats, len(group)), tensors)
            _step[(len(programs.tensors),)](
                addresses, *programs, _numbers(tuple(one.decay for one in group), self.device),
                _numbers(tuple(one.lr_scale for one in group), self.device), now, len(group),
                betas[0], 1 - betas[0], betas[1], 1 - betas[1], eps,
                MASTER=DTYPES[master], GRADIENT=DTYPES[gradient], COPY=tl.int16 if split else DTYPES[copy or master],
                COPIED=copy is not None, SPLIT=split, ALIGNED=aligned, BLOCKS=STEP_BLOCKS, BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip


@lru_cache(maxsize=64)
def _numbers(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values).to(device)
