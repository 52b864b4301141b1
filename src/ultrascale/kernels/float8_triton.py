"""Triton kernels of the fp8 fused block: each casts a GEMM's operand to fp8 in the pass that computes it.

Forward kernels have a whole row in registers, so that its largest entry, and thus the row's scale, costs no extra pass.
Backward kernels read a tile once and write it both transposed and not, with one scale for the tensor. The plain
implementations are in kernels/float8_block.py, the gain of each in docs/fp8.md.

If one conversion to e5m2 is both stored in a row and shuffled to be transposed, ptxas 12.8 loses every fourth value. So what is
written in both orders is converted twice, with a scale that is loaded twice, so that the compiler cannot merge the conversions.
"""

# No postponed annotations: Triton reads them.
import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from ultrascale.kernels.fused_triton import normed_row

ROWS, COLUMNS, WARPS = 32, 128, 4  # of a tile
ELEMENTS_PER_WARP = 1024  # of a row


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _factor(largest, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The power of two that scales the largest entry to just below the limit."""
    factor = LIMIT / tl.maximum(largest, 1e-12)
    return (factor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _rounded(wide, factor, LIMIT: tl.constexpr, to):  # type: ignore[no-untyped-def]
    return tl.clamp(wide * factor, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL).to(to)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _cast_rows(x, out, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    wide = tl.load(x + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    factor = _factor(tl.max(tl.abs(wide), 0), LIMIT)
    tl.store(scale + row, 1.0 / factor)
    tl.store(out + row * WIDTH + at, _rounded(wide, factor, LIMIT, out.dtype.element_ty), mask=inside)


def cast_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, c] in fp8, and the scale of each row [n, 1]."""
    rows, width = x.shape
    out, scale = torch.empty(x.shape, dtype=dtype, device=x.device), _row_scales(x)
    _cast_rows[(rows,)](x, out, scale, LIMIT=torch.finfo(dtype).max, **_row_options(width))
    return out, scale


def _row_scales(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(len(x), 1, dtype=torch.float32, device=x.device)


def _row_options(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"WIDTH": width, "BLOCK": block, "num_warps": min(16, max(4, block // ELEMENTS_PER_WARP))}


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _norm_cast(  # type: ignore[no-untyped-def]
    x, added, weight, total, out, scale, roots, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    normed = normed_row(x, added, weight, total, roots, eps, row, at, WIDTH, ADDS)
    factor = _factor(tl.max(tl.abs(normed), 0), LIMIT)
    tl.store(scale + row, 1.0 / factor)
    tl.store(out + row * WIDTH + at, _rounded(normed, factor, LIMIT, out.dtype.element_ty), mask=at < WIDTH)


def norm_cast(
    x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [n, h] + added, its norm in fp8, the fp8 scale of each row, and the norm's reciprocal root of each row [n]."""
    rows, width = x.shape
    total = x if added is None else torch.empty_like(x)
    out, scale = torch.empty(x.shape, dtype=dtype, device=x.device), _row_scales(x)
    roots = torch.empty(rows, dtype=torch.float32, device=x.device)
    _norm_cast[(rows,)](
        x, x if added is None else added, weight, total, out, scale, roots, eps,
        ADDS=added is not None, LIMIT=torch.finfo(dtype).max, **_row_options(width),
    )  # fmt: skip
    return total, out, scale, roots


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gate_cast(both, out, scale, inputs, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    g = tl.load(both + row * 2 * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(both + row * 2 * WIDTH + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(inputs + row, tl.max(tl.maximum(tl.abs(g), tl.abs(u)), 0))
    wide = g * tl.sigmoid(g) * u
    factor = _factor(tl.max(tl.abs(wide), 0), LIMIT)
    tl.store(scale + row, 1.0 / factor)
    tl.store(out + row * WIDTH + at, _rounded(wide, factor, LIMIT, out.dtype.element_ty), mask=inside)


def gate_cast(both: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """silu(gate) · up of both [n, 2·f] in fp8, the scale of each row, and the largest entry of each row of both [n]."""
    rows, width = both.shape[0], both.shape[1] // 2
    out, scale = torch.empty(rows, width, dtype=dtype, device=both.device), _row_scales(both)
    inputs = torch.empty(rows, dtype=torch.float32, device=both.device)
    _gate_cast[(rows,)](both, out, scale, inputs, LIMIT=torch.finfo(dtype).max, **_row_options(width))
    return out, scale, inputs


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _cast(  # type: ignore[no-untyped-def]
    x, largest, roots, gain, out, transposed, scale, rows, columns,
    LIMIT: tl.constexpr, NORM: tl.constexpr, KEEP: tl.constexpr, TURN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    factor = _factor(tl.load(largest), LIMIT)
    down = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    across = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale, 1.0 / factor)
    inside = (down < rows) & (across < columns)
    wide = tl.load(x + down * columns + across, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        wide = wide * tl.load(roots + down, mask=down < rows, other=0.0)
        wide = wide * tl.load(gain + across, mask=across < columns, other=0.0).to(tl.float32)
    if KEEP:
        tl.store(out + down * columns + across, _rounded(wide, factor, LIMIT, out.dtype.element_ty), mask=inside)
        factor = _factor(tl.load(largest, volatile=True), LIMIT)  # see the docstring of this file
    if TURN:
        narrow = _rounded(wide, factor, LIMIT, transposed.dtype.element_ty)
        tl.store(transposed + across.trans() * rows + down.trans(), narrow.trans(), mask=inside.trans())


Norm = tuple[torch.Tensor, torch.Tensor]
"""reciprocal roots of the rows and gain: a norm that is applied first"""


def cast_transposed(
    x: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype, norm: Norm | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, c] in fp8 and transposed, and its scale."""
    transposed, scale = torch.empty(x.shape[::-1], dtype=dtype, device=x.device), _scale(x)
    _cast[_tiles(*x.shape)](
        x, largest, *(norm or (x, x)), x, transposed, scale, *x.shape,
        NORM=norm is not None, KEEP=False, TURN=True, **_tile_options(dtype),
    )  # fmt: skip
    return transposed, scale


def cast(
    x: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype, norm: Norm | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, c] in fp8, not transposed, and its scale."""
    out, scale = torch.empty(x.shape, dtype=dtype, device=x.device), _scale(x)
    _cast[_tiles(*x.shape)](
        x, largest, *(norm or (x, x)), out, out, scale, *x.shape,
        NORM=norm is not None, KEEP=True, TURN=False, **_tile_options(dtype),
    )  # fmt: skip
    return out, scale


def cast_and_transpose(
    x: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [n, c] in fp8, not transposed and transposed, and the scale of both."""
    out, transposed = (torch.empty(shape, dtype=dtype, device=x.device) for shape in (x.shape, x.shape[::-1]))
    scale = _scale(x)
    _cast[_tiles(*x.shape)](
        x, largest, x, x, out, transposed, scale, *x.shape, NORM=False, KEEP=True, TURN=True, **_tile_options(dtype)
    )
    return out, transposed, scale


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _transpose(x, out, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    down = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    across = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (down < rows) & (across < columns)
    tile = tl.load(x + down * columns + across, mask=inside)
    tl.store(out + across.trans() * stride + down.trans(), tile.trans(), mask=inside.trans())


def transpose(x: torch.Tensor, out: torch.Tensor) -> None:
    """Writes x [n, c], of one byte per element, to `out` [c, n]: columns of a matrix."""
    grid = triton.cdiv(x.shape[0], COLUMNS), triton.cdiv(x.shape[1], COLUMNS)
    narrow, turned = (one.view(torch.uint8) for one in (x, out))
    _transpose[grid](narrow, turned, *x.shape, out.stride(0), ROWS=COLUMNS, COLUMNS=COLUMNS, num_warps=WARPS)


def _scale(x: torch.Tensor) -> torch.Tensor:
    """A separate allocation: cuBLAS needs a scale at an address that is a multiple of 16."""
    return torch.empty((), dtype=torch.float32, device=x.device)


def _tiles(rows: int, columns: int) -> tuple[int, int]:
    return triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS)


def _tile_options(dtype: torch.dtype) -> dict[str, float]:
    return {"LIMIT": torch.finfo(dtype).max, "ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": WARPS}


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gate_backward_cast(  # type: ignore[no-untyped-def]
    grad, both, of_grad, of_both, of_gated, grad_both, transposed, gated, scale, gated_scale, rows,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # |silu'| is below 1.1 and |silu(x)| below |x|: one bound for both halves.
    factor = _factor(1.1 * tl.load(of_grad) * tl.load(of_both), WIDE)
    other = _factor(1.1 * tl.load(of_grad, volatile=True) * tl.load(of_both), WIDE)
    gated_factor = _factor(tl.load(of_gated), NARROW)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale, 1.0 / factor)
        tl.store(gated_scale, 1.0 / gated_factor)
    down = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    across = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (down < rows) & (across < WIDTH)
    d = tl.load(grad + down * WIDTH + across, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(both + down * 2 * WIDTH + across, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(both + down * 2 * WIDTH + WIDTH + across, mask=inside, other=0.0).to(tl.float32)
    open_ = tl.sigmoid(g)
    silu = g * open_
    to = grad_both.dtype.element_ty
    out = _rounded(silu * u, gated_factor, NARROW, gated.dtype.element_ty)
    grad_gate, grad_up = d * u * (open_ + silu * (1 - open_)), d * silu
    tl.store(grad_both + down * 2 * WIDTH + across, _rounded(grad_gate, factor, WIDE, to), mask=inside)
    tl.store(grad_both + down * 2 * WIDTH + WIDTH + across, _rounded(grad_up, factor, WIDE, to), mask=inside)
    there = across.trans() * rows + down.trans()
    tl.store(gated + there, out.trans(), mask=inside.trans())
    tl.store(transposed + there, _rounded(grad_gate, other, WIDE, to).trans(), mask=inside.trans())
    tl.store(transposed + WIDTH * rows.to(tl.int64) + there, _rounded(grad_up, other, WIDE, to).trans(), mask=inside.trans())


def gate_backward_cast(
    grad: torch.Tensor,
    both: torch.Tensor,
    of_grad: torch.Tensor,
    of_both: torch.Tensor,
    of_gated: torch.Tensor,
    formats: tuple[torch.dtype, torch.dtype],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of both [n, 2·f], not transposed and transposed, the gate's output transposed, and the scales of the two."""
    (rows, width), (wide, narrow) = grad.shape, formats
    grad_both, transposed = (torch.empty(shape, dtype=wide, device=both.device) for shape in (both.shape, both.shape[::-1]))
    gated = torch.empty(width, rows, dtype=narrow, device=both.device)
    scale, gated_scale = _scale(both), _scale(both)
    _gate_backward_cast[_tiles(rows, width)](
        grad, both, of_grad, of_both, of_gated, grad_both, transposed, gated, scale, gated_scale, rows, WIDTH=width,
        WIDE=torch.finfo(wide).max, NARROW=torch.finfo(narrow).max, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return grad_both, transposed, gated, scale, gated_scale
