"""The enumeration: every legal layout is a candidate, and what is skipped is never the best."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from builders import make_job
from ultrascale.cost.estimate import estimate
from ultrascale.cost.legality import problem
from ultrascale.plan.candidates import LayoutConstraints, cores, why_empty
from ultrascale.plan.search import plan
from ultrascale.schedules import REGISTRY
from ultrascale.specs.errors import SpecError, divisors
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout


def enumerated(of: Job, constraints: LayoutConstraints) -> set[Layout]:
    found = set()
    for group in cores(of, constraints):
        for row in range(len(group.columns)):
            layout = group.columns.layout(row)
            for schedule, loops in group.variants:
                one = layout.model_copy(update={"schedule": schedule, "virtual_stages": loops})
                if problem(of, one) is None:
                    found.add(one)
    return found


def by_brute_force(of: Job, loops: int = 8) -> set[Layout]:
    """Every combination of every field, kept when legal, less what the enumeration skips."""
    world, found = of.cluster.gpus, set()
    sizes = divisors(world)
    experts = divisors(of.model.moe.experts) if of.model.moe else [1]
    schedules = [(name, v) for name, spec in REGISTRY.items() for v in range(1, loops + 1) if spec.takes(v)]
    for dp, tp, pp, cp in product(sizes, repeat=4):
        if dp * tp * pp * cp != world or of.sequences % dp:
            continue
        shardings = [(zero, None, False) for zero in range(4 if dp * cp > 1 else 1)]
        shardings += [(3, None, True)] if dp * cp > 1 else []
        exchanges = ["zigzag", "allgather", "ulysses"] if cp > 1 else ["zigzag"]
        passes = of.sequences // dp
        for ep, mbs, sharding, variant, pair, recompute in product(
            experts, divisors(passes), shardings, exchanges, schedules, ("none", "selective", "full")
        ):
            layout = Layout(
                dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, mbs=mbs, gas=passes // mbs, recompute=recompute,
                zero=sharding[0], zero_shards=sharding[1], keep_gathered=sharding[2],
                context_parallel=variant, schedule=pair[0], virtual_stages=pair[1],
            )  # fmt: skip
            if problem(of, layout) is None:
                found |= {layout.changed(dispatcher=one) for one in ("alltoall", *(("deepep",) if ep > 1 else ()))}
    return found


@pytest.mark.quick_cases("tiny")
@pytest.mark.parametrize("model", ["tiny", "mixtral-8x7b"])
def test_every_legal_layout_is_a_candidate_and_no_other(model: str) -> None:
    """4 GPUs in one box, 4 sequences. One fast domain, so there is no HSDP to try."""
    of = make_job(model, "4xh100", 1024, 4)
    candidates, legal = enumerated(of, LayoutConstraints()), by_brute_force(of)
    assert len(candidates) > 300
    assert {x for x in candidates if x.virtual_stages <= 8} == legal
    # Beyond eight loops only those are tried that cut the layers evenly.
    assert all(of.model.layers % (x.pp * x.virtual_stages) == 0 for x in candidates if x.virtual_stages > 8)


def test_hsdp_shards_over_one_fast_domain() -> None:
    shards = {
        x.zero_shards for x in enumerated(make_job("tiny", "16xh100", 1024, 16), LayoutConstraints(fixed={"pp": 1, "cp": 1}))
    }
    assert shards == {None, 8, 4, 2}  # 8 GPUs a box over tp of 1, 2 and 4


def test_an_odd_sequence_slice_uses_the_contiguous_ring() -> None:
    """seq = 1022 splits into 2 but not into 4 slices: zig-zag is not legal there, so the ring stands in."""
    words = {x.context_parallel for x in enumerated(make_job("tiny", "2xh100", 1022, 2), LayoutConstraints(fixed={"cp": 2}))}
    assert words == {"ring", "allgather", "ulysses"}


LEFT_OUT = [
    {"sequence_parallel": False},
    {"context_parallel": "ring"},
    {"data_parallel": "naive"},
    {"data_parallel": "hooks"},
    {"offload": "optimizer"},
]


@pytest.mark.quick_cases(every=8)
@pytest.mark.parametrize("change", LEFT_OUT, ids=lambda change: "=".join(map(str, *change.items())))
@pytest.mark.parametrize(
    ("model", "cluster", "seq", "sequences"),
    [("llama-3-8b", "16xh100", 8192, 64), ("llama-3-70b", "32xa100-80gb", 4096, 64), ("deepseek-v2-lite", "16xh200", 4096, 64)],
)
def test_skipped_layouts_are_never_the_best(model: str, cluster: str, seq: int, sequences: int, change: dict[str, Any]) -> None:
    """The best layout with the field pinned to what the search skips is no faster than the best without."""
    of = make_job(model, cluster, seq, sequences)
    best = plan(of, explain=False, top=1).plans[0]
    name, value = next(iter(change.items()))
    pinned = plan(of, explain=False, top=1, fix=[f"{name}={str(value).lower()}"]).plans
    assert all(one.estimate.step_time_s >= best.estimate.step_time_s * (1 - 1e-9) for one in pinned)


PAIRS = [
    ({"sequence_parallel": False}, Layout(dp=2, tp=8, gas=32, zero=1)),
    ({"sequence_parallel": False}, Layout(tp=4, pp=4, gas=64)),
    ({"context_parallel": "ring"}, Layout(dp=2, cp=8, gas=32, zero=1)),
    ({"context_parallel": "ring"}, Layout(tp=4, cp=4, gas=64, zero=3)),
    ({"data_parallel": "naive"}, Layout(dp=16, gas=4)),
    ({"data_parallel": "hooks"}, Layout(dp=16, gas=4)),
    ({"offload": "optimizer"}, Layout(dp=16, gas=4, zero=1)),
    ({"offload": "parameters"}, Layout(dp=16, gas=4, zero=3)),
]


@pytest.mark.parametrize(("change", "layout"), PAIRS, ids=str)
def test_each_pruning_rule_on_one_layout(change: dict[str, Any], layout: Layout) -> None:
    """No sequence parallelism: more memory. Contiguous ring, naive, hooks: same memory, slower. Offload: less, slower."""
    of = make_job("llama-3-8b", "16xh100", 8192, 64)
    kept, other = estimate(of, layout), estimate(of, layout.changed(**change))
    if "sequence_parallel" in change:
        # The time is that of an all-reduce instead of a gather and a scatter, which Hopper's switch may do a little faster.
        assert other.peak_gib > kept.peak_gib
        assert other.step_time_s > kept.step_time_s * 0.99
        return
    assert other.step_time_s > kept.step_time_s
    if "offload" in change:
        assert other.peak_gib < kept.peak_gib
    else:
        assert other.peak_gib == pytest.approx(kept.peak_gib)


def test_fixed_fields_are_kept_and_forbidden_ones_absent() -> None:
    of = make_job("tiny", "8xh100", 1024, 16)
    constraints = LayoutConstraints.parse(["tp=2, recompute=full"], ["cp", "zero=3", "schedule=afab"])
    assert constraints.fixed == {"tp": 2, "recompute": "full", "cp": 1}
    found = enumerated(of, constraints)
    assert found
    for layout in found:
        assert (layout.tp, layout.recompute, layout.cp) == (2, "full", 1)
        assert layout.zero != 3
        assert layout.schedule != "afab"


@pytest.mark.parametrize(
    ("fix", "forbid", "words"),
    [
        (["tp"], [], "must be a field and a value, such as --fix tp=8"),
        (["tq=8"], [], "no field 'tq'"),
        (["tp=8"], ["tp"], "contradict"),
        (["zero=3"], ["zero=3"], "contradict"),
        (["recompute=some"], [], "must be one of none, selective, full"),
        ([], ["context_parallel"], "needs a value to rule out"),
        ([], ["nonsense"], "no field 'nonsense'"),
    ],
)
def test_contradictory_constraints_are_explained(fix: list[str], forbid: list[str], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        LayoutConstraints.parse(fix, forbid)


def test_a_fixed_value_that_breaks_a_rule_is_named() -> None:
    of = make_job("llama-3-8b", "8xh100", 8192, 8)
    assert why_empty(of, LayoutConstraints(fixed={"tp": 3})).startswith("layout.tp is 3 but must divide heads = 32")
    with pytest.raises(SpecError, match="must divide heads = 32"):
        plan(of, fix=["tp=3"])
