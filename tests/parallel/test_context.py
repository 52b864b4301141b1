"""Every variant of context parallelism against attention in one process: outputs and gradients of q, k and v."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ultrascale.launch import local
from ultrascale.model.attention import TileAttention
from ultrascale.model.self_attention import CausalAttention
from ultrascale.model.transformer import Transformer
from ultrascale.parallel import comm, context
from ultrascale.parallel.comm import Axis
from ultrascale.parallel.context import ContextCore, positions
from ultrascale.specs.errors import SpecError
from ultrascale.specs.layout import ContextParallel
from ultrascale.specs.model import Model
from ultrascale.specs.validate import build

torch.set_num_threads(1)

VARIANTS: list[ContextParallel] = ["allgather", "ring", "zigzag", "ulysses"]
ATTEND = TileAttention.forward
SHIFT = comm.shift_start
ALONE = Axis("cp", None, 0, 1, (0,))


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    seq: int
    dim: int = 8
    batch: int = 2
    dtype: torch.dtype = torch.float64
    window: int | None = None

    def tensors(self) -> list[Tensor]:
        """q, k, v and the gradient of the output, for the whole sequence."""
        generator = torch.Generator().manual_seed(7)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(self.batch, self.seq, n, self.dim) for n in heads]
        return [torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype) for shape in shapes]


def reference(case: Case) -> list[Tensor]:
    """Output, dq, dk, dv with the scores written out, in float64: no kernel shared with the code under test."""
    q, k, v, grad = (x.double() for x in case.tensors())
    for x in (q, k, v):
        x.requires_grad_()
    keys, values = (x.repeat_interleave(case.heads // case.kv_heads, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * case.dim**-0.5
    mask = torch.ones(case.seq, case.seq, dtype=torch.bool).tril()
    if case.window is not None:
        mask = mask.triu(1 - case.window)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), values)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def ranks_of(rank: int, nproc: int, store: str, cases: list[tuple[ContextParallel, Case]]) -> list[list[Tensor]]:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc)
    axis = Axis("cp", dist.group.WORLD, rank, nproc, tuple(range(nproc)))
    try:
        return [sliced(axis, variant, case) for variant, case in cases]
    finally:
        dist.destroy_process_group()


def sliced(axis: Axis, variant: ContextParallel, case: Case) -> list[Tensor]:
    """What this rank computes of output, dq, dk, dv."""
    own = positions(case.seq, axis, variant)
    q, k, v, grad = (x[:, own] for x in case.tensors())
    for x in (q, k, v):
        x.requires_grad_()
    out = ContextCore(axis, variant, CausalAttention(case.window))(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def joined(results: list[list[Tensor]], variant: ContextParallel, seq: int) -> list[Tensor]:
    """The ranks' slices, put back where they stand in the sequence."""
    size = len(results)
    order = torch.cat([positions(seq, Axis("cp", None, rank, size, tuple(range(size))), variant) for rank in range(size)])
    return [torch.cat(slices, 1)[:, order.argsort()] for slices in zip(*results, strict=True)]


def check(size: int, cases: list[tuple[ContextParallel, Case]], tolerance: float) -> None:
    """All cases in one start of the ranks: starting costs more than computing."""
    results = local.run(ranks_of, size, cases, timeout_s=120)
    for index, (variant, case) in enumerate(cases):
        found = joined([rank[index] for rank in results], variant, case.seq)
        for name, actual, wanted in zip(("out", "dq", "dk", "dv"), found, reference(case), strict=True):
            assert actual.dtype == case.dtype
            error = (actual - wanted).abs().max() / wanted.abs().max()
            assert error <= tolerance, f"{variant} over {size} ranks, {case}: {name} is off by {error:.1e}"


def legal(size: int, variant: ContextParallel, case: Case) -> bool:
    if variant == "ulysses":
        return case.heads % size == 0 and (case.kv_heads % size == 0 or size % case.kv_heads == 0)
    return case.seq % (2 * size if variant == "zigzag" else size) == 0


@pytest.mark.quick_cases(every=5)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_equals_one_process(size: int, dtype: torch.dtype, tolerance: float) -> None:
    shapes = [(8, 4), (8, 2), (4, 4), (6, 3), (6, 1)]
    # One long enough for several tiles of the kernel, and one with a slice per rank of a few tokens.
    cases = [Case(heads, kv, seq, dtype=dtype) for heads, kv in shapes for seq in (size * 50, size * 6)]
    cases.append(Case(12, 4, size * 2, dim=5, batch=1, dtype=dtype))
    selected = [(variant, case) for variant in VARIANTS for case in cases if legal(size, variant, case)]
    assert {variant for variant, _ in selected} == set(VARIANTS)
    check(size, selected, tolerance)


def test_slices_of_one_token() -> None:
    check(4, [("ring", Case(4, 2, seq=4)), ("allgather", Case(4, 2, seq=4)), ("zigzag", Case(4, 2, seq=8))], 1e-12)


def test_bfloat16_stays_within_its_rounding() -> None:
    check(2, [(variant, Case(4, 2, seq=16, dtype=torch.bfloat16)) for variant in VARIANTS], 2e-2)


def test_ulysses_cuts_a_sliding_window() -> None:
    check(2, [("ulysses", Case(4, 2, seq=24, window=5))], 1e-12)


@pytest.mark.parametrize("variant", ["allgather", "ring", "zigzag"])
def test_the_others_refuse_a_sliding_window(variant: ContextParallel) -> None:
    with pytest.raises(SpecError, match=rf"context_parallel is {variant} .* 4096 tokens.*context_parallel=ulysses"):
        ContextCore(ALONE, variant, CausalAttention(4096))


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_rank_is_plain_attention(variant: ContextParallel) -> None:
    case = Case(4, 2, seq=6)
    for actual, wanted in zip(sliced(ALONE, variant, case), reference(case), strict=True):
        torch.testing.assert_close(actual, wanted)


def test_positions_of_three_ranks() -> None:
    axes = [Axis("cp", None, rank, 3, (0, 1, 2)) for rank in range(3)]
    assert [positions(6, axis, "ring").tolist() for axis in axes] == [[0, 1], [2, 3], [4, 5]]
    assert [positions(6, axis, "zigzag").tolist() for axis in axes] == [[0, 5], [1, 4], [2, 3]]
    assert positions(4, ALONE, "zigzag").tolist() == [0, 1, 2, 3]


def test_zigzag_balances_work_over_ranks() -> None:
    """Scores per rank in squares of a rank's tokens, of which a causal block is half of one: 2 on average over 4 ranks."""
    assert local.run(mean_visible_keys, 4, "zigzag", timeout_s=60) == [2.0] * 4
    assert local.run(mean_visible_keys, 4, "ring", timeout_s=60) == [0.5, 1.5, 2.5, 3.5]


def mean_visible_keys(rank: int, nproc: int, store: str, variant: ContextParallel) -> float:
    scores: list[float] = []

    def counting(tiles: TileAttention, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        scores.append(q.shape[1] * k.shape[1] * (0.5 if causal else 1.0))
        return ATTEND(tiles, q, k, v, causal)

    TileAttention.forward = counting  # type: ignore[method-assign]
    case = Case(2, 2, seq=8 * nproc)
    ranks_of(rank, nproc, store, [(variant, case)])
    slice_squared = (case.seq // nproc) ** 2
    return sum(scores) / slice_squared


def test_the_ring_sends_before_it_computes() -> None:
    """Forward over 3 ranks: each hop is in flight while the present block is computed."""
    for events in local.run(traced, 3, timeout_s=60):
        assert events == ["send", "attend", "send", "attend", "attend"]


def traced(rank: int, nproc: int, store: str) -> list[str]:
    events: list[str] = []

    def shift_start(tensors: list[Tensor], axis: Axis) -> comm.AsyncCollective[list[Tensor]]:
        events.append("send")
        return SHIFT(tensors, axis)

    def noting(tiles: TileAttention, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        events.append("attend")
        return ATTEND(tiles, q, k, v, causal)

    comm.shift_start = shift_start  # type: ignore[assignment]
    TileAttention.forward = noting  # type: ignore[method-assign]
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc)
    x = torch.ones(1, 4, 2, 4)
    ContextCore(Axis("cp", dist.group.WORLD, rank, nproc, (0, 1, 2)), "zigzag", CausalAttention())(x, x, x)
    dist.destroy_process_group()
    return events


@pytest.mark.parametrize("variant", ["allgather", "ring", "zigzag"])
def test_backward_keeps_only_what_is_local(variant: ContextParallel) -> None:
    """q and the output of 4 heads, k and v of 2, 8 tokens of 8 numbers each, and a log-sum-exp per head and token."""
    wanted = 8 * 2 * (2 * 4 * 8 + 2 * 2 * 8) + 8 * 2 * 4
    assert local.run(kept, 2, variant, timeout_s=60) == [wanted, wanted]


def kept(rank: int, nproc: int, store: str, variant: ContextParallel) -> int:
    numbers: list[int] = []

    def note(x: Tensor) -> Tensor:
        numbers.append(x.untyped_storage().nbytes() // x.element_size())
        return x

    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc)
    core = ContextCore(Axis("cp", dist.group.WORLD, rank, nproc, (0, 1)), variant, CausalAttention())
    q, k, v = (torch.randn(2, 8, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        core(q, k, v)
    dist.destroy_process_group()
    return sum(numbers)


MODEL = Model(name="tiny", layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=40)


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_equal_one_process(variant: ContextParallel) -> None:
    """Summed loss and every gradient, added up over the ranks."""
    alone = learned(ALONE, variant)
    ranks = local.run(learned_in_ranks, 2, variant, timeout_s=60)
    for name, wanted in alone.items():
        total = torch.stack([one[name] for one in ranks]).sum(0)
        torch.testing.assert_close(total, wanted, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


# All of these change with the length of the whole sequence or with global positions beyond the original context.
SCALINGS: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_positions": 4},
}


@pytest.mark.quick_cases(every=4)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_scaled_positions_are_those_of_the_whole_sequence(variant: ContextParallel, scaling: str) -> None:
    model = build(Model, {**MODEL.model_dump(), "max_positions": 5, "rope_scaling": SCALINGS[scaling]}, "model")
    alone = learned(ALONE, variant, model)
    plain = learned(ALONE, variant, MODEL)
    assert not torch.allclose(alone["loss"], plain["loss"], rtol=1e-6)
    ranks = local.run(learned_in_ranks, 2, variant, model, timeout_s=60)
    for name, wanted in alone.items():
        total = torch.stack([one[name] for one in ranks]).sum(0)
        torch.testing.assert_close(total, wanted, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


def learned_in_ranks(rank: int, nproc: int, store: str, variant: ContextParallel, spec: Model = MODEL) -> dict[str, Tensor]:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc)
    try:
        return learned(Axis("cp", dist.group.WORLD, rank, nproc, (0, 1)), variant, spec)
    finally:
        dist.destroy_process_group()


def learned(axis: Axis, variant: ContextParallel, spec: Model = MODEL) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = Transformer(spec).double()
    tokens, targets = torch.randint(0, MODEL.vocab, (2, 2, 12))
    context.apply(model, axis, variant)
    own = positions(12, axis, variant)
    loss = model(tokens[:, own], own, targets[:, own])
    loss.backward()
    return {"loss": loss.detach()} | {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def test_apply_replaces_every_attention_core_or_none() -> None:
    two = Axis("cp", None, 0, 2, (0, 1))
    model = Transformer(MODEL)
    context.apply(model, ALONE, "ring")
    assert all(type(block.attention.core) is CausalAttention for block in model.blocks.values())
    context.apply(model, two, "ring")
    assert all(type(block.attention.core) is ContextCore for block in model.blocks.values())


def test_a_window_over_the_whole_sequence_is_no_window() -> None:
    two = Axis("cp", None, 0, 2, (0, 1))
    windowed = MODEL.model_copy(update={"sliding_window": 16})
    context.apply(Transformer(windowed), two, "ring", seq=16)
    with pytest.raises(SpecError, match="context_parallel=ulysses"):
        context.apply(Transformer(windowed), two, "ring", seq=32)
    with pytest.raises(SpecError, match="context_parallel=ulysses"):
        context.apply(Transformer(windowed), two, "ring")
