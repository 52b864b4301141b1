"""Triton kernels of the fused block: norm with residual sum, in-place rotary embedding, gate, their backward; merged attention.

Each backward also writes what its forward did not save (the norm's output, the gate's), which the next GEMM needs: its inputs
are in registers anyway. The plain implementations are in kernels/fused.py, the gain of each in docs/kernels.
"""

# No postponed annotations: Triton reads them.
import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

WARPS = 4
PROGRAMS, STAGES = 2, 3  # of the norm's backward: programs per multiprocessor, rows of each in flight
BLOCK = 4096  # elements of a row per program of the gate
MERGED_ROWS = 32  # of one head, per program that merges attention


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def normed_row(x, added, weight, total, scales, eps, row, at, WIDTH: tl.constexpr, ADDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The RMSNorm of one row of x + added in fp32; stores the sum and the norm's scale."""
    inside = at < WIDTH
    values = tl.load(x + row * WIDTH + at, mask=inside, other=0.0)
    if ADDS:
        values = values + tl.load(added + row * WIDTH + at, mask=inside, other=0.0)
        tl.store(total + row * WIDTH + at, values, mask=inside)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    tl.store(scales + row, scale)
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    return wide * scale * gain


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _norm(x, added, weight, total, out, scales, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    normed = normed_row(x, added, weight, total, scales, eps, row, at, WIDTH, ADDS)
    tl.store(out + row * WIDTH + at, normed.to(out.dtype.element_ty), mask=at < WIDTH)


def norm(
    x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [n, h] + added, its norm, and the norm's scale of each row [n]."""
    rows, width = x.shape
    total = x if added is None else torch.empty_like(x)
    out, scales = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    _norm[(rows,)](
        x, x if added is None else added, weight, total, out, scales, eps,
        WIDTH=width, BLOCK=triton.next_power_of_2(width), ADDS=added is not None, num_warps=WARPS,
    )  # fmt: skip
    return total, out, scales


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _norm_backward(  # type: ignore[no-untyped-def]
    grad, x, scales, weight, residual, grad_x, grad_weight, out, rows, each,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, WRITE_OUT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    first = program * each
    for row in tl.range(first, tl.minimum(first + each, rows), num_stages=STAGES):
        start = row * WIDTH
        wide = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + start + at, mask=inside, other=0.0).to(tl.float32)
        past = tl.load(residual + start + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row)
        unit = wide * scale
        sums += g * unit
        g = g * gain
        inner = tl.sum(g * unit, 0) / WIDTH
        tl.store(grad_x + start + at, (past + scale * (g - unit * inner)).to(grad_x.dtype.element_ty), mask=inside)
        if WRITE_OUT:
            tl.store(out + start + at, (unit * gain).to(out.dtype.element_ty), mask=inside)
    tl.store(grad_weight + program * WIDTH + at, sums, mask=inside)


def norm_backward(
    grad: torch.Tensor, x: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, with `residual` added, and of the weight; and the recomputed output of the norm."""
    out = torch.empty_like(x)
    return *norm_gradients(grad, x, scales, weight, residual, out), out


def norm_gradients(
    grad: torch.Tensor,
    x: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and of the weight; the norm's output is written to `out` if given."""
    rows, width = x.shape
    each = triton.cdiv(rows, PROGRAMS * _processors(x.device))
    programs = triton.cdiv(rows, each)
    grad_x = torch.empty_like(x)
    grad_weight = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _norm_backward[(programs,)](
        grad, x, scales, weight, residual, grad_x, grad_weight, grad_x if out is None else out, rows, each,
        WIDTH=width, BLOCK=triton.next_power_of_2(width), STAGES=STAGES, WRITE_OUT=out is not None, num_warps=WARPS,
    )  # fmt: skip
    return grad_x, grad_weight.sum(0).to(weight.dtype)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _rotate(  # type: ignore[no-untyped-def]
    q, k, v, cos, sin, length, q_row, k_row, to,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, BOTH: tl.constexpr, VALUES: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    end = to + row * (QUERIES + 2 * KEYS) * 2 * HALF
    head = tl.arange(0, BOTH)[:, None]
    at = tl.arange(0, HALF)[None, :]
    position = row % length
    c = tl.load(cos + position * 2 * HALF + at).to(to.dtype.element_ty).to(tl.float32)
    s = tl.load(sin + position * 2 * HALF + at).to(to.dtype.element_ty).to(tl.float32)
    if BACK:
        s = -s
    inside = head < QUERIES + KEYS
    start = tl.where(head < QUERIES, q + row * q_row + head * 2 * HALF, k + row * k_row + (head - QUERIES) * 2 * HALF) + at
    left = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(start + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(end + head * 2 * HALF + at, (left * c - right * s).to(to.dtype.element_ty), mask=inside)
    tl.store(end + head * 2 * HALF + HALF + at, (right * c + left * s).to(to.dtype.element_ty), mask=inside)
    if BACK:
        own = tl.arange(0, VALUES)[:, None]
        across = own * 2 * HALF + tl.arange(0, 2 * HALF)[None, :]
        values = tl.load(v + row * k_row + across, mask=own < KEYS)
        tl.store(end + (QUERIES + KEYS) * 2 * HALF + across, values, mask=own < KEYS)


def rotate_(qkv: torch.Tensor, heads: int, kv_heads: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates the queries and keys of qkv [n, heads + 2·kv_heads, d] in place; cos and sin [s, d]."""
    rows, n_heads, dim = qkv.shape
    parts = qkv, qkv[:, heads:], qkv
    _rotate[(rows,)](*parts, cos, sin, len(cos), n_heads * dim, n_heads * dim, qkv, BACK=False, **_heads(heads, kv_heads, dim))


def rotate_back(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Gradients of q, k and v [n, heads, d] as one [n, heads + 2·kv_heads, d], before the rotation."""
    (rows, heads, dim), kv_heads = q.shape, k.shape[1]
    out = torch.empty(rows, heads + 2 * kv_heads, dim, dtype=q.dtype, device=q.device)
    _rotate[(rows,)](q, k, v, cos, sin, len(cos), heads * dim, kv_heads * dim, out, BACK=True, **_heads(heads, kv_heads, dim))
    return out


def _heads(heads: int, kv_heads: int, dim: int) -> dict[str, int]:
    powers = {"BOTH": triton.next_power_of_2(heads + kv_heads), "VALUES": triton.next_power_of_2(kv_heads)}
    return {"QUERIES": heads, "KEYS": kv_heads, "HALF": dim // 2, "num_warps": WARPS, **powers}


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gate(both, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    g = tl.load(both + row * 2 * WIDTH + at, mask=inside).to(tl.float32)
    u = tl.load(both + row * 2 * WIDTH + WIDTH + at, mask=inside).to(tl.float32)
    tl.store(out + row * WIDTH + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


def gate(both: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up of both [n, 2·f]."""
    rows, width = both.shape[0], both.shape[1] // 2
    out = torch.empty(rows, width, dtype=both.dtype, device=both.device)
    _gate[(rows, triton.cdiv(width, BLOCK))](both, out, WIDTH=width, BLOCK=BLOCK, num_warps=WARPS)
    return out


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gate_backward(grad, both, grad_both, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    d = tl.load(grad + row * WIDTH + at, mask=inside).to(tl.float32)
    g = tl.load(both + row * 2 * WIDTH + at, mask=inside).to(tl.float32)
    u = tl.load(both + row * 2 * WIDTH + WIDTH + at, mask=inside).to(tl.float32)
    open_ = tl.sigmoid(g)
    silu = g * open_
    to = grad_both.dtype.element_ty
    tl.store(out + row * WIDTH + at, (silu * u).to(to), mask=inside)
    tl.store(grad_both + row * 2 * WIDTH + at, (d * u * (open_ + silu * (1 - open_))).to(to), mask=inside)
    tl.store(grad_both + row * 2 * WIDTH + WIDTH + at, (d * silu).to(to), mask=inside)


def gate_backward(grad: torch.Tensor, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of both, and the recomputed output of the gate."""
    rows, width = grad.shape
    grad_both, out = torch.empty_like(both), torch.empty_like(grad)
    _gate_backward[(rows, triton.cdiv(width, BLOCK))](grad, both, grad_both, out, WIDTH=width, BLOCK=BLOCK, num_warps=WARPS)
    return grad_both, out


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _merge(  # type: ignore[no-untyped-def]
    out, lse, tile_out, tile_lse, length, out_batch, out_row, lse_batch, lse_head, tile_batch, tile_row, tile_head,
    tile_lse_batch, tile_lse_head, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    at, wide_row = tl.arange(0, WIDTH)[None, :], row[:, None].to(tl.int64)
    inside = row < length
    mask = inside[:, None] & (at < DIM)
    old_at, new_at = batch * lse_batch + head * lse_head + row, batch * tile_lse_batch + head * tile_lse_head + row
    old, new = tl.load(lse + old_at, mask=inside, other=0.0), tl.load(tile_lse + new_at, mask=inside, other=0.0)
    share = tl.sigmoid(new - old)[:, None]
    place = out + batch * out_batch + wide_row * out_row + head * DIM + at
    before = tl.load(place, mask=mask, other=0.0)
    more = tl.load(tile_out + batch * tile_batch + wide_row * tile_row + head * tile_head + at, mask=mask, other=0.0)
    tl.store(place, before + share * (more.to(tl.float32) - before), mask=mask)
    largest = tl.maximum(old, new)
    merged = largest + tl.log(tl.exp(old - largest) + tl.exp(new - largest))
    tl.store(lse + old_at, merged, mask=inside)


def merge_attention_(out: torch.Tensor, lse: torch.Tensor, tile_out: torch.Tensor, tile_lse: torch.Tensor) -> None:
    """Merges attention over more keys into `out` [b, s, heads, d] in fp32 and `lse` [b, heads, s], in place."""
    batch, length, heads, dim = out.shape
    _merge[(triton.cdiv(length, MERGED_ROWS), heads, batch)](
        out, lse, tile_out, tile_lse, length, out.stride(0), out.stride(1), lse.stride(0), lse.stride(1),
        tile_out.stride(0), tile_out.stride(1), tile_out.stride(2), tile_lse.stride(0), tile_lse.stride(1),
        DIM=dim, WIDTH=triton.next_power_of_2(dim), ROWS=MERGED_ROWS, num_warps=WARPS,
    )  # fmt: skip
