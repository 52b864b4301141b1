"""Triton kernels of the gated delta rule (model/linear_attention.py): chunks of 64 tokens, each head's state in registers.

In a chunk the tokens' values depend on each other by a unit triangular system; its inverse T gives what they write into an
empty state, U = T·step·v, and what the state changes in that, W = T·step·decay·k: they write V = U − W·S. `prepare` computes U
and W for all chunks at once, `scan` passes the state from chunk to chunk, `scan_back` its gradient, and `gradients` computes
those of the inputs, again for all chunks at once. Operands of GEMMs have the inputs' dtype, sums and the state fp32.

Names in the kernels: q, k, v of a chunk [C, d], of unit length the first two; g [C]: sums of log decays from the chunk's start;
S, dS [dk, dv]: the state before a chunk and the gradient of that after it.
"""

# No postponed annotations: Triton reads them.
import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from ultrascale.model.linear_attention import CHUNK, NORM_EPS

COLUMNS = 64
"""of values that a program takes at a time: with 32 Triton 3.6 multiplies bf16 wrongly on Hopper, without a word"""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _dot(a, b, like):  # type: ignore[no-untyped-def]
    return tl.dot(a.to(like), b.to(like), input_precision="ieee")


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _exact_dot(a, b):  # type: ignore[no-untyped-def]
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _unit(start, at, here, WIDTH: tl.constexpr, EPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of queries or keys scaled to length one, and the scales."""
    columns = tl.arange(0, WIDTH)
    rows = tl.load(start + at[:, None] * WIDTH + columns[None, :], mask=here[:, None], other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(rows * rows, 1) + EPS)
    return rows * scale[:, None], scale


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _between(g, i, j):  # type: ignore[no-untyped-def]
    """Decay from token j to a later token i, or to itself; 0 for earlier ones."""
    return tl.exp(tl.where(i >= j, g[:, None] - g[None, :], float("-inf")))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _join(inverse, system, i, j, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """From inverses of diagonal blocks of SIZE to those of twice the size."""
    beside = tl.where((i // (2 * SIZE) == j // (2 * SIZE)) & (i // SIZE != j // SIZE), system, 0.0)
    return inverse - _exact_dot(inverse, _exact_dot(beside, inverse))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _inverse(system, i, j):  # type: ignore[no-untyped-def]
    """Of 1 + system, which is strictly lower triangular: diagonal blocks of 8 by powers, then blocks of twice the size."""
    one = tl.where(i == j, 1.0, 0.0)
    near = tl.where(i // 8 == j // 8, system, 0.0)
    square = _exact_dot(near, near)
    found = _exact_dot(one - near, one + square)
    found = _exact_dot(found, one + _exact_dot(square, square))
    found = _join(found, system, i, j, 8)
    found = _join(found, system, i, j, 16)
    return _join(found, system, i, j, 32)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _prepare(  # type: ignore[no-untyped-def]
    k, v, decay, step, written, stated, inverse, length, chunks, heads, repeats,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, EPS: tl.constexpr, STORE_INVERSE: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    like = k.dtype.element_ty
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    tokens = chunk * C + tl.arange(0, C)
    here = tokens < length
    at = ((row // heads) * length + tokens) * heads + row % heads
    g = tl.cumsum(tl.load(decay + at, mask=here, other=0.0))
    beta = tl.load(step + at, mask=here, other=0.0)
    keys, _ = _unit(k, at // repeats, here, K, EPS)
    system = tl.where(i > j, _dot(keys, tl.trans(keys), like) * _between(g, i, j) * beta[:, None], 0.0)
    solved = _inverse(system, i, j)
    into = (row * chunks + chunk) * C + tl.arange(0, C).to(tl.int64)
    if STORE_INVERSE:
        tl.store(inverse + into[:, None] * C + j, solved.to(like))
    found = _dot(solved, keys * (beta * tl.exp(g))[:, None], like)
    tl.store(stated + into[:, None] * K + tl.arange(0, K)[None, :], found.to(like))
    columns = tl.arange(0, V)[None, :]
    values = tl.load(v + at[:, None] * V + columns, mask=here[:, None], other=0.0)
    found = _dot(solved, values * beta[:, None], like)
    tl.store(written + into[:, None] * V + columns, found.to(like))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _scan(  # type: ignore[no-untyped-def]
    q, k, decay, written, stated, out, states, length, chunks, heads, repeats,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr, EPS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    like = k.dtype.element_ty
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    columns = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    depth = tl.arange(0, K)
    state = tl.zeros((K, COLUMNS), tl.float32)
    for chunk in range(chunks):
        tokens = chunk * C + tl.arange(0, C)
        here = tokens < length
        at = ((row // heads) * length + tokens) * heads + row % heads
        into = (row * chunks + chunk) * C + tl.arange(0, C).to(tl.int64)
        g = tl.cumsum(tl.load(decay + at, mask=here, other=0.0))
        last = tl.sum(tl.load(decay + at, mask=here, other=0.0))
        keys, _ = _unit(k, at // repeats, here, K, EPS)
        values = tl.load(written + into[:, None] * V + columns)
        factors = tl.load(stated + into[:, None] * K + depth[None, :])
        values = values.to(tl.float32) - _dot(factors, state, like)
        if BACKWARD:
            place = ((row * chunks + chunk) * K + depth.to(tl.int64))[:, None] * V + columns
            tl.store(states + place, state.to(like))
            tl.store(written + into[:, None] * V + columns, values.to(like))
        else:
            queries, _ = _unit(q, at // repeats, here, K, EPS)
            queries = queries * K**-0.5
            scores = _dot(queries, tl.trans(keys), like) * _between(g, i, j)
            found = _dot(queries * tl.exp(g)[:, None], state, like) + _dot(scores, values, like)
            tl.store(out + at[:, None] * V + columns, found.to(like), mask=here[:, None])
        keys = keys * tl.exp(last - g)[:, None]
        state = state * tl.exp(last) + _dot(tl.trans(keys), values, like)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _scan_back(  # type: ignore[no-untyped-def]
    q, k, decay, grad, stated, grad_states, grad_values, length, chunks, heads, repeats,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    like = k.dtype.element_ty
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    columns = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    depth = tl.arange(0, K)
    state = tl.zeros((K, COLUMNS), tl.float32)
    for turn in range(chunks):
        chunk = chunks - 1 - turn
        tokens = chunk * C + tl.arange(0, C)
        here = tokens < length
        at = ((row // heads) * length + tokens) * heads + row % heads
        into = (row * chunks + chunk) * C + tl.arange(0, C).to(tl.int64)
        place = ((row * chunks + chunk) * K + depth.to(tl.int64))[:, None] * V + columns
        tl.store(grad_states + place, state.to(like))
        g = tl.cumsum(tl.load(decay + at, mask=here, other=0.0))
        last = tl.sum(tl.load(decay + at, mask=here, other=0.0))
        keys, _ = _unit(k, at // repeats, here, K, EPS)
        queries, _ = _unit(q, at // repeats, here, K, EPS)
        queries = queries * K**-0.5
        outer = tl.load(grad + at[:, None] * V + columns, mask=here[:, None], other=0.0)
        scores = _dot(queries, tl.trans(keys), like) * _between(g, i, j)
        values = _dot(tl.trans(scores), outer, like) + _dot(keys * tl.exp(last - g)[:, None], state, like)
        tl.store(grad_values + into[:, None] * V + columns, values.to(like))
        factors = tl.load(stated + into[:, None] * K + depth[None, :])
        state = state * tl.exp(last) + _dot(tl.trans(queries * tl.exp(g)[:, None]), outer, like)
        state -= _dot(tl.trans(factors), values, like)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gradients(  # type: ignore[no-untyped-def]
    q, k, v, decay, step, grad, written, inverse, states, grad_states, grad_values,
    grad_q, grad_k, grad_v, grad_decay, grad_step, length, chunks, heads, repeats,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    like = k.dtype.element_ty
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    depth = tl.arange(0, K)
    tokens = chunk * C + tl.arange(0, C)
    here = tokens < length
    at = ((row // heads) * length + tokens) * heads + row % heads
    into = (row * chunks + chunk) * C + tl.arange(0, C).to(tl.int64)
    place = ((row * chunks + chunk) * K + depth.to(tl.int64))[:, None] * V
    g = tl.cumsum(tl.load(decay + at, mask=here, other=0.0))
    last = tl.sum(tl.load(decay + at, mask=here, other=0.0))
    beta = tl.load(step + at, mask=here, other=0.0)
    solved = tl.load(inverse + into[:, None] * C + j)

    # Of decayed queries, of W, of keys that write into the next state, of scores, of 1 + system inverted, of decays.
    d_queries = tl.zeros((C, K), tl.float32)
    d_stated = tl.zeros((C, K), tl.float32)
    d_writing = tl.zeros((C, K), tl.float32)
    d_scores = tl.zeros((C, C), tl.float32)
    d_solved = tl.zeros((C, C), tl.float32)
    d_beta = tl.zeros((C,), tl.float32)
    d_last = 0.0
    for start in range(0, V, COLUMNS):
        columns = (start + tl.arange(0, COLUMNS))[None, :]
        state = tl.load(states + place + columns)
        d_state = tl.load(grad_states + place + columns)
        outer = tl.load(grad + at[:, None] * V + columns, mask=here[:, None], other=0.0)
        values = tl.load(written + into[:, None] * V + columns)
        d_values = tl.load(grad_values + into[:, None] * V + columns)
        d_queries += _dot(outer, tl.trans(state), like)
        d_stated -= _dot(d_values, tl.trans(state), like)
        d_writing += _dot(values, tl.trans(d_state), like)
        d_scores += _dot(outer, tl.trans(values), like)
        d_last += tl.sum(state.to(tl.float32) * d_state.to(tl.float32))
        inputs = tl.load(v + at[:, None] * V + columns, mask=here[:, None], other=0.0).to(tl.float32)
        d_solved += _dot(d_values, tl.trans(inputs * beta[:, None]), like)
        d_stepped = _dot(tl.trans(solved), d_values, like)
        tl.store(grad_v + at[:, None] * V + columns, (d_stepped * beta[:, None]).to(like), mask=here[:, None])
        d_beta += tl.sum(d_stepped * inputs, 1)

    keys, key_scale = _unit(k, at // repeats, here, K, EPS)
    queries, query_scale = _unit(q, at // repeats, here, K, EPS)
    between, exp_g, to_end = _between(g, i, j), tl.exp(g), tl.exp(last - g)
    products = _dot(keys, tl.trans(keys), like)
    scores = _dot(queries, tl.trans(keys), like) * K**-0.5 * between

    of_products = d_scores * between
    d_queries = d_queries * exp_g[:, None]
    d_g = tl.sum(d_queries * queries, 1) * K**-0.5 + tl.sum(d_scores * scores, 1)
    d_g -= tl.sum(d_scores * scores, 0)
    d_queries += _dot(of_products, keys, like)
    d_queries *= K**-0.5
    d_queries = query_scale[:, None] * (d_queries - queries * tl.sum(d_queries * queries, 1)[:, None])
    tl.store(grad_q + at[:, None] * K + depth[None, :], d_queries.to(like), mask=here[:, None])

    d_keys = d_writing * to_end[:, None]
    from_end = tl.sum(d_keys * keys, 1)
    d_g -= from_end
    d_last = d_last * tl.exp(last) + tl.sum(from_end)
    d_keys += _dot(tl.trans(of_products), queries * K**-0.5, like)

    d_solved += _dot(d_stated, tl.trans(keys * (beta * exp_g)[:, None]), like)
    d_stepped = _dot(tl.trans(solved), d_stated, like) * exp_g[:, None]
    d_keys += d_stepped * beta[:, None]
    along = tl.sum(d_stepped * keys, 1)
    d_beta += along
    d_g += along * beta
    d_system = _dot(tl.trans(solved), _dot(d_solved, tl.trans(solved), like), like)
    d_system = tl.where(i > j, -d_system * between, 0.0)
    d_beta += tl.sum(d_system * products, 1)
    d_system *= beta[:, None]
    d_g += tl.sum(d_system * products, 1) - tl.sum(d_system * products, 0)
    d_keys += _dot(d_system, keys, like) + _dot(tl.trans(d_system), keys, like)
    d_keys = key_scale[:, None] * (d_keys - keys * tl.sum(d_keys * keys, 1)[:, None])
    tl.store(grad_k + at[:, None] * K + depth[None, :], d_keys.to(like), mask=here[:, None])

    tl.store(grad_step + at, d_beta, mask=here)
    # Each decay is in the sums of all tokens after it.
    tl.store(grad_decay + at, tl.sum(d_g) + d_last - tl.cumsum(d_g) + d_g, mask=here)


class _Sizes:
    """How programs are cut: `chunks` of a sequence, `rows` of one head of one sequence each."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        batch, self.length, self.heads, self.values = v.shape
        self.keys, self.repeats = k.shape[-1], self.heads // k.shape[2]
        self.chunks, self.rows = triton.cdiv(self.length, CHUNK), batch * self.heads
        self.numbers = self.length, self.chunks, self.heads, self.repeats
        self.constants = {"C": CHUNK, "K": self.keys, "V": self.values, "EPS": NORM_EPS}
        self.columns = min(COLUMNS, self.values)

    def empty(self, like: torch.Tensor, *shape: int) -> torch.Tensor:
        """[rows, chunks, …] in the dtype of `like`."""
        return like.new_empty(self.rows, self.chunks, *shape)


def prepare(
    k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, step: torch.Tensor, backward: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """U, W and, for backward, T, of all chunks."""
    sizes = _Sizes(k, v)
    written, stated = sizes.empty(v, CHUNK, sizes.values), sizes.empty(k, CHUNK, sizes.keys)
    inverse = sizes.empty(k, CHUNK, CHUNK) if backward else written
    _prepare[sizes.chunks, sizes.rows](
        k, v, log_decay, step, written, stated, inverse, *sizes.numbers, **sizes.constants, STORE_INVERSE=backward,
        num_warps=4,
    )  # fmt: skip
    return written, stated, inverse


def scan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, written: torch.Tensor, stated: torch.Tensor
) -> torch.Tensor:
    """The rule's output, like v."""
    sizes, out = _Sizes(k, v), torch.empty_like(v)
    _scan[sizes.values // sizes.columns, sizes.rows](
        q, k, log_decay, written, stated, out, out, *sizes.numbers, **sizes.constants, COLUMNS=sizes.columns, BACKWARD=False,
        num_warps=4,
    )  # fmt: skip
    return out


def scan_states(
    k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, written: torch.Tensor, stated: torch.Tensor
) -> torch.Tensor:
    """The states before each chunk. In `written` U becomes V."""
    sizes = _Sizes(k, v)
    states = sizes.empty(k, sizes.keys, sizes.values)
    _scan[sizes.values // sizes.columns, sizes.rows](
        k, k, log_decay, written, stated, states, states, *sizes.numbers, **sizes.constants, COLUMNS=sizes.columns,
        BACKWARD=True, num_warps=4,
    )  # fmt: skip
    return states


def scan_back(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, log_decay: torch.Tensor, stated: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the states after each chunk, and of V."""
    sizes = _Sizes(k, grad)
    grad_states, grad_values = sizes.empty(k, sizes.keys, sizes.values), sizes.empty(grad, CHUNK, sizes.values)
    _scan_back[sizes.values // sizes.columns, sizes.rows](
        q, k, log_decay, grad, stated, grad_states, grad_values, *sizes.numbers, **sizes.constants, COLUMNS=sizes.columns,
        num_warps=8,
    )  # fmt: skip
    return grad_states, grad_values


def gradients(
    inputs: tuple[torch.Tensor, ...], grad: torch.Tensor, written: torch.Tensor, inverse: torch.Tensor, states: torch.Tensor,
    grad_states: torch.Tensor, grad_values: torch.Tensor,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Of q and k for each head of v, and of v, log_decay and step."""
    _, k, v, log_decay, step = inputs
    sizes = _Sizes(k, v)
    per_head = (*v.shape[:3], sizes.keys)
    found = (
        k.new_empty(per_head), k.new_empty(per_head), torch.empty_like(v), torch.empty_like(log_decay), torch.empty_like(step)
    )  # fmt: skip
    _gradients[sizes.chunks, sizes.rows](
        *inputs, grad, written, inverse, states, grad_states, grad_values, *found, *sizes.numbers, **sizes.constants,
        COLUMNS=sizes.columns, num_warps=8,
    )  # fmt: skip
    return found
