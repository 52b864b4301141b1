"""The fewest GPUs: days, price and energy by hand, minimality against plans of every number, budgets, sentences that work."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from builders import make_job, make_plan
from ultrascale import Cluster, Job, Layout, SpecError, fewest_gpus, plan
from ultrascale.plan import compare_kinds
from ultrascale.plan.gpu_counts import MANY_PLANS, NEIGHBOURS, Span, TrainingCost, _Counts
from ultrascale.specs.framework import Framework
from ultrascale.specs.units import duration_days, total_tokens, usd

TOKENS = 2 * 10**12


def job_on(kind: str = "h100", price: float | None = 2.0, **fields: Any) -> Job:
    cluster = Cluster.load(f"8x{kind}").model_copy(update={"price_per_gpu_hour_usd": price})
    values = {"framework": Framework.own(kind), "total_tokens": TOKENS, "seq": 4096, "batch": 64, **fields}
    return make_job("llama-3.2-1b", cluster, **values)


def days(gpus: int, job: Job) -> float:
    best = plan(job.changed(cluster=job.cluster.resized(gpus)), top=1, explain=False).plans[0]
    assert best.job.total_tokens is not None
    return best.job.total_tokens / best.estimate.tokens_per_s / 86400


def test_days_price_and_energy_by_hand() -> None:
    made = make_plan(Layout(dp=64, zero=1, gas=8))
    cluster = made.job.cluster.model_copy(update={"price_per_gpu_hour_usd": 2.5})
    # 8.64e9 tokens at 1,000 tokens/s are 100 days; of 1 s a step, 0.9 to 1.3 in the range.
    span = made.estimate.range
    assert span is not None
    span = span.model_copy(update={"step_time_low_s": 0.9, "step_time_high_s": 1.3})
    update = {"tokens_per_s": 1000.0, "step_time_s": 1.0, "range": span}
    cost = TrainingCost(
        made.model_copy(
            update={
                "job": made.job.model_copy(update={"cluster": cluster, "total_tokens": 8_640_000_000}),
                "estimate": made.estimate.model_copy(update=update),
            }
        ),
        pue=1.5,
    )
    assert cost.days == Span(100, pytest.approx(90), pytest.approx(130))
    assert cost.gpu_hours.value == 64 * 24 * 100 == 153_600
    assert cost.price_usd is not None
    assert (cost.price_usd.value, cost.price_usd.high) == (384_000, pytest.approx(499_200))
    assert cost.energy_mwh.value == pytest.approx(153_600 * 700 * 1.5 / 1e6)  # 161.28


def test_no_smaller_number_of_gpus_is_enough() -> None:
    job = job_on(price=None)
    by_days = 1.1 * days(40, job)
    found = fewest_gpus(job, by_days=by_days)
    assert found.fewest is not None
    assert found.fewest.days.value <= by_days
    assert found.fewest.price_usd is None
    smaller = [1, 2, 4, *range(8, found.fewest.gpus, 8)]
    assert len(smaller) > 4
    assert min(days(gpus, job) for gpus in smaller) > by_days
    assert len(found.planned) < 2 * len(smaller)
    best = plan(job.changed(cluster=Cluster.load(f"{found.fewest.gpus}xh100")), top=10).plans[0]
    assert (best.layout, best.estimate) == (found.fewest.plan.layout, found.fewest.plan.estimate)
    assert found.fewest.plan.reasons == best.reasons


def test_a_part_of_a_node_is_enough_for_a_long_training() -> None:
    job = job_on()
    found = fewest_gpus(job, by_days=1.01 * days(2, job))
    assert found.fewest is not None
    assert found.fewest.gpus == 2


def curve(monkeypatch: pytest.MonkeyPatch, days_of: Any, node: int = 8) -> _Counts:
    """The search over a made-up curve of days by GPUs."""

    def planned(_: _Counts, gpus: int) -> Any:
        value = days_of(gpus)
        rate = 1e6 / value / gpus
        return SimpleNamespace(gpus=gpus, days=Span(value, value, value), rate=rate)

    monkeypatch.setattr(_Counts, "_plan", planned)
    cluster: Any = SimpleNamespace(gpus_per_node=node, gpu=SimpleNamespace(name="h100"))
    return _Counts(SimpleNamespace(cluster=cluster), 16_384, 1.2, (), (), 0.9, 0.0, lambda _: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("needed", [1, 3, 8, 13, 64, 65, 100, 777, 1024, 5000, 16_000])
@pytest.mark.parametrize("guess", [1, 50, 16_384])
def test_the_search_is_exact_and_short_where_days_fall(monkeypatch: pytest.MonkeyPatch, needed: int, guess: int) -> None:
    counts = curve(monkeypatch, lambda gpus: 1000 / gpus**0.9)
    by_days = 1000 / needed**0.9
    found = counts.fewest(lambda cost: cost.days.value <= by_days, guess, lambda: 1)
    assert found is not None
    assert found.gpus == next(one for one in counts.allowed if one >= needed)
    assert len(counts.planned) <= 14 + 11 + NEIGHBOURS + 5 * 7


def test_the_search_finds_a_smaller_number_where_days_are_not_monotone(monkeypatch: pytest.MonkeyPatch) -> None:
    # Odd numbers of nodes take 1.5 times as long: of 100 to 109 nodes the even ones alone are enough.
    counts = curve(monkeypatch, lambda gpus: (1.5 if gpus // 8 % 2 else 1) * 1e4 / gpus)
    found = counts.fewest(lambda cost: cost.days.value <= 1e4 / 800, 1, lambda: 800 / 1.5)
    assert found is not None
    assert found.gpus == 800
    assert {792, 784, 776} <= counts.planned.keys()
    assert len(counts.planned) <= MANY_PLANS + NEIGHBOURS


def test_a_number_below_is_planned_whatever_the_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    # Days that rise and fall by a tenth, with a period that suits no power of two.
    counts = curve(monkeypatch, lambda gpus: (1 + 0.1 * (gpus // 8 * 7919 % 13) / 12) * 1e4 / gpus**0.3)
    found = counts.fewest(lambda cost: cost.days.value <= 1e4 / 9000**0.3, 1, lambda: 1)
    assert found is not None
    assert found.days.value <= 1e4 / 9000**0.3
    below = counts.planned[found.gpus - 8]
    assert below is not None
    assert below.days.value > 1e4 / 9000**0.3
    assert len(counts.planned) <= MANY_PLANS + 60


def test_the_fewest_and_the_fastest_for_a_budget() -> None:
    job = job_on(price=2.0)
    budget = 1.05 * 2 * 24 * 8 * days(8, job)
    found = fewest_gpus(job, budget_usd=budget, most_gpus=256)
    assert found.fewest is not None
    assert found.fastest is not None
    for one in (found.fewest, found.fastest):
        assert one.price_usd is not None
        assert one.price_usd.value <= budget
    assert found.fastest.gpus > found.fewest.gpus
    assert found.fastest.days.value < found.fewest.days.value
    over = [cost for gpus, cost in found.planned.items() if cost is not None and gpus > found.fastest.gpus]
    assert over
    assert all(cost.price_usd is not None and cost.price_usd.value > budget for cost in over)


@pytest.mark.slow
def test_deadline_and_budget_must_both_hold() -> None:
    job = job_on(price=2.0)
    by_days = 1.02 * days(32, job)
    alone = fewest_gpus(job, by_days=by_days)
    assert alone.fewest is not None
    assert alone.fewest.price_usd is not None
    price = alone.fewest.price_usd.value
    both = fewest_gpus(job, by_days=by_days, budget_usd=1.01 * price)
    assert both.fewest is not None
    assert both.fewest.gpus == alone.fewest.gpus
    refused = fewest_gpus(job, by_days=by_days, budget_usd=0.97 * price, most_gpus=512)
    assert refused.fewest is None
    assert refused.problem is not None
    better = re.search(r"--budget (\S+)", refused.problem)
    assert better is not None
    again = fewest_gpus(job, by_days=by_days, budget_usd=usd(better[1], "--budget"))
    assert again.problem is None


@pytest.mark.slow
def test_a_deadline_that_no_number_meets_has_values_that_work() -> None:
    job = job_on()
    found = fewest_gpus(job, by_days=1, most_gpus=64)
    assert found.fewest is None
    assert found.problem is not None
    assert found.problem.startswith(
        "no number of h100 up to 64 trains 2T tokens in 1 day with this batch: the fastest, 64, take "
    )
    by, tokens = re.search(r"--by (\S+), --tokens (\S+) or a larger --batch-tokens", found.problem).groups()  # type: ignore[union-attr]
    assert fewest_gpus(job, by_days=duration_days(by, "--by"), most_gpus=64).fewest is not None
    fewer = job.changed(total_tokens=total_tokens(tokens, "--tokens"))
    assert fewest_gpus(fewer, by_days=1, most_gpus=64).fewest is not None


@pytest.mark.slow
def test_a_budget_that_no_number_meets_has_values_that_work() -> None:
    job = job_on(price=2.0)
    found = fewest_gpus(job, budget_usd=1000, most_gpus=32)
    assert found.problem is not None
    assert "2T tokens cost at least " in found.problem
    budget, tokens = re.search(r"--budget (\S+) or --tokens (\S+)$", found.problem).groups()  # type: ignore[union-attr]
    assert fewest_gpus(job, budget_usd=usd(budget, "--budget"), most_gpus=32).fewest is not None
    fewer = job.changed(total_tokens=total_tokens(tokens, "--tokens"))
    assert fewest_gpus(fewer, budget_usd=1000, most_gpus=32).fewest is not None


def test_kinds_are_compared_at_one_number_of_gpus() -> None:
    jobs = [job_on("h100").changed(cluster=Cluster.load("16xh100")), job_on("b200").changed(cluster=Cluster.load("16xb200"))]
    slow, fast = compare_kinds(jobs, pue=1.0)
    for one in (slow, fast):
        assert one.plan is not None
        assert one.plan.layout == plan(one.job, top=1).plans[0].layout
    assert slow.cost is not None
    assert fast.cost is not None
    assert fast.cost.days.value < slow.cost.days.value
    assert fast.cost.energy_mwh.value == pytest.approx(16 * 24 * fast.cost.days.value * 1000 / 1e6)
    without = job_on().changed(total_tokens=None)
    assert compare_kinds([without])[0].cost is None


@pytest.mark.parametrize(
    ("job", "options", "sentence"),
    [
        (job_on(), {}, "neither --by nor --budget was given: try --by 30d"),
        (job_on(), {"by_days": -1.0}, "--by is -1 but must be above zero: try 30d"),
        (job_on(), {"by_days": float("nan")}, "--by is nan but must be above zero: try 30d"),
        (job_on(), {"budget_usd": 0.0}, "--budget is 0 but must be above zero: try 2M$"),
        (job_on(total_tokens=None), {"by_days": 1.0}, "--by needs the tokens of the whole training: try --tokens 15T"),
        (
            job_on(price=None),
            {"budget_usd": 1e6},
            "--budget needs your price of a GPU hour in US dollars: try --price h100=2.5",
        ),
        (job_on(), {"by_days": 1.0, "pue": 0.9}, "--pue is 0.9 but must be from 1 to 10: try 1.2"),
        (job_on(), {"by_days": 1.0, "fix": ["tp=7"]}, "layout.tp is 7 but "),
    ],
)
def test_refused(job: Job, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError, match=re.escape(sentence)):
        fewest_gpus(job, most_gpus=16, **options)
