"""Ranges of an estimate: from the runs that resemble it, wider where there are few, and never a certainty."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import make_job
from ultrascale.cost import ranges
from ultrascale.cost.estimate import estimate
from ultrascale.cost.hardware import SUSTAINED
from ultrascale.cost.ranges import MIN_SIMILAR_RUNS, PredictionError, estimate_range, quantile, regime, similar, time_range
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.estimate import CAUSES, Time
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model

JOB = make_job(seq=4096, batch=32, framework="ultrascale")
COMPUTE = "compute-bound"


def time(**seconds: float) -> Time:
    """Nine tenths of a second of matmuls beside what is given."""
    return Time(**{**dict.fromkeys(CAUSES, 0.0), "matmul_s": 0.9, **seconds})


ONE_SECOND = time(matmul_s=1.0)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([1, 2, 3, 4, 5], 0.5, 3.0),
        ([5, 3, 1, 4, 2], 0.25, 1.5),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 0.90, 9.0),
        ([1, 2, 3, 4, 5], 0.90, 5.0),
        ([1, 2], 0.5, 1.5),
        ([7], 0.9, 7.0),
        ([1, 2, 3], 0.0, 1.0),
        ([1, 2, 3], 1.0, 3.0),
    ],
)
def test_quantiles_by_hand(values: list[float], share: float, expected: float) -> None:
    assert quantile(each_its_own(values), share) == pytest.approx(expected)


def each_its_own(values: list[float]) -> list[PredictionError]:
    return [PredictionError(value, str(number)) for number, value in enumerate(values)]


def test_sources_have_equal_weight_whatever_their_number_of_runs() -> None:
    many = [PredictionError(0.0, "many") for _ in range(100)]
    others = [PredictionError(log, f"one of {log}") for log in (-0.3, -0.2, 0.2, 0.3)]
    assert quantile([*many, *others], 0.90) == pytest.approx(0.3)
    assert quantile([*many, *others], 0.10) == pytest.approx(-0.3)
    assert quantile([*many, *others], 0.50) == pytest.approx(0.0)
    # 0.25 of six votes are 1.5: one of them lies below −0.2's middle, and the half of the new source that is below all.
    assert quantile([*many, *others], 0.25) == pytest.approx(-0.25)


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=50), st.floats(0, 1))
def test_a_quantile_lies_within_the_values(values: list[float], share: float) -> None:
    assert min(values) - 1e-9 <= quantile(each_its_own(values), share) <= max(values) + 1e-9


@pytest.mark.parametrize(
    ("model", "cluster", "framework", "layout"),
    [
        ("llama-3-8b", "8xh100", "ultrascale", Layout(dp=8, zero=3, gas=4)),
        ("llama-3-8b", "8xa100-80", "nanotron", Layout(dp=8, zero=1, gas=4)),
        ("llama-3-8b", "16xb200", "megatron-core", Layout(dp=2, tp=8, gas=4)),
        ("qwen3-30b-a3b", "32xh100", "megatron-core", Layout(dp=32, ep=8, zero=1, gas=4)),
        ("llama-3-8b", "8xmi300x", "torchtitan", Layout(dp=8, zero=3, gas=4)),
    ],
)
def test_an_estimate_lies_in_its_range_and_names_its_reference_runs(
    model: str, cluster: str, framework: str, layout: Layout
) -> None:
    where = Cluster.load(cluster)
    what = Job(
        model=Model.load(model),
        cluster=where,
        seq=4096,
        batch_tokens=layout.batch_tokens(4096),
        framework=Framework.load(framework),
    )
    predicted = estimate(what, layout)
    span = predicted.range
    assert span is not None
    assert 0 < span.step_time_low_s <= predicted.step_time_s <= span.step_time_high_s
    assert span.step_time_low_s < span.step_time_high_s
    assert 0 < span.peak_low_gib <= predicted.peak_gib <= span.peak_high_gib
    assert 0 < span.fit_probability < 1
    count = re.match(r"(\d+) runs", span.based_on)
    assert count is not None
    assert int(count[1]) == len(similar(what, span.regime).errors) >= MIN_SIMILAR_RUNS


def test_fitting_becomes_less_likely_as_the_peak_nears_the_capacity() -> None:
    peaks = [40.0, 60.0, 70.0, 74.0, 76.0, 78.0, 80.0, 82.0, 86.0, 100.0, 160.0]
    chances = [estimate_range(JOB, ONE_SECOND, peak, 80.0).fit_probability for peak in peaks]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] > 0.9
    assert chances[-1] < 0.1
    assert len(set(chances)) > 3
    assert all(0 < chance < 1 for chance in chances)


def test_the_range_scales_with_the_step() -> None:
    one, ten = (estimate_range(JOB, time(matmul_s=each), 50.0, 80.0) for each in (1.0, 10.0))
    assert ten.step_time_low_s == pytest.approx(10 * one.step_time_low_s)
    assert ten.step_time_high_s == pytest.approx(10 * one.step_time_high_s)


def row(log: float, source: str = "a/a", architecture: str = "hopper", regime: str = COMPUTE) -> Any:
    return {"id": f"{source} {log}", "source": source, "architecture": architecture, "regime": regime, "log": log}


def rows(count: int, sources: int = 2, **fields: Any) -> list[Any]:
    return [row(number / 100, source=f"source/{number % sources}", **fields) for number in range(count)]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(*lists: list[Any]) -> None:
        table = {"time": [one for some in lists for one in some], "memory": [{"id": "m", "source": "a/a", "log": 0.0}]}
        monkeypatch.setattr(ranges, "_residuals", lambda: table)

    return use


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"attention_s": 0.1}, COMPUTE),
        ({"tensor_s": 0.08, "send_s": 0.07}, COMPUTE),
        ({"tensor_s": 0.08, "send_s": 0.08}, "communication-bound"),
        ({"launch_s": 0.03, "overhead_s": 0.03, "data_s": 0.5, "matmul_s": 0.4}, "host-bound"),
    ],
)
def test_the_regime_is_what_the_step_depends_on_most(seconds: dict[str, float], expected: str) -> None:
    """Exposed communication from 15 % of the step on; launches from 5 % on come before it."""
    spent = time(**seconds)
    assert regime(JOB, spent) == expected
    assert regime(make_job("qwen3-30b-a3b", "32xh100", 4096, 128, "ultrascale"), spent) == "experts"


def test_reference_runs_are_of_the_same_regime_and_chip_where_enough(runs: Any) -> None:
    runs(rows(MIN_SIMILAR_RUNS), rows(30, regime="communication-bound"), rows(30, architecture="ampere"))
    found = similar(JOB, COMPUTE)
    assert len(found.errors) == MIN_SIMILAR_RUNS
    assert found.words == f"{MIN_SIMILAR_RUNS} runs of 2 sources: compute-bound dense models on hopper"
    assert not found.outside


def test_reference_runs_extend_to_other_chips(runs: Any) -> None:
    runs(rows(MIN_SIMILAR_RUNS - 1), rows(30, architecture="ampere"), rows(30, regime="experts"))
    found = similar(JOB, COMPUTE)
    assert len(found.errors) == MIN_SIMILAR_RUNS - 1 + 30
    assert found.words.endswith(": compute-bound dense models")
    assert not found.outside  # two sources measured dense models on the chip


def test_a_chip_that_one_source_measured_is_outside_and_may_be_slower(runs: Any) -> None:
    runs(rows(MIN_SIMILAR_RUNS, sources=1), rows(30, architecture="ampere"))
    found, ampere = similar(JOB, COMPUTE), similar(make_job(cluster="8xa100-80", seq=4096, batch=32), COMPUTE)
    assert found.outside == "fewer than 2 sources measured such models on hopper"
    assert not ampere.outside
    shares = [rates["bf16"] for rates in SUSTAINED.values()]
    wide = quantile(found.errors, 0.95)
    assert found.interval()[1] == pytest.approx(wide + math.log(max(shares) / min(shares)))
    assert ampere.interval()[1] == pytest.approx(quantile(ampere.errors, 0.90))


def test_a_regime_without_runs_is_outside(runs: Any) -> None:
    runs(rows(MIN_SIMILAR_RUNS))
    found = similar(JOB, "host-bound")
    assert found.outside == "too few runs of host-bound dense models were measured"
    assert found.words.endswith(": all models")


def test_an_unknown_engine_is_outside_and_may_be_faster(runs: Any) -> None:
    runs(rows(MIN_SIMILAR_RUNS))
    unknown = make_job(seq=4096, batch=32, framework="unknown")
    spent = time(memory_bound_s=0.1)
    low, _, found = time_range(unknown, spent)
    assert found.outside == "an engine that is not known"
    # Of its memory-bound second tenth, a lean engine would need a third.
    assert low == pytest.approx(math.exp(quantile(found.errors, 0.08)) * (1 - 0.1 * 2 / 3))


def test_moe_models_use_runs_of_moe_models(runs: Any) -> None:
    runs(rows(40), rows(20, regime="experts", architecture="ampere"), rows(4, regime="experts"))
    found = similar(make_job("qwen3-30b-a3b", "32xh100", 4096, 128, "ultrascale"), "experts")
    assert len(found.errors) == 24
    assert found.words.endswith(": models with experts")


def test_an_excluded_source_contributes_no_runs(runs: Any) -> None:
    runs(rows(MIN_SIMILAR_RUNS), [row(9.0, source="odd/one"), row(-9.0, source="odd/one")])
    odd = {PredictionError(9.0, "odd/one"), PredictionError(-9.0, "odd/one")}
    assert odd <= set(similar(JOB, COMPUTE).errors)
    assert not odd & set(similar(JOB, COMPUTE, "odd/one").errors)
    low, high, _ = time_range(JOB, ONE_SECOND, "odd/one")
    assert math.exp(0.0) <= low < high <= math.exp(MIN_SIMILAR_RUNS / 100)


def test_optimistic_predictions_shift_the_range_up(runs: Any) -> None:
    """All ratios between 1.10 and 1.22: the truth is 10 to 22 % slower than predicted."""
    runs([row(math.log(1.10 + number / 100), source=f"s/{number}") for number in range(MIN_SIMILAR_RUNS + 1)])
    low, high, _ = time_range(JOB, ONE_SECOND)
    assert low == pytest.approx(1.10 * (1.11 / 1.10) ** 0.40, rel=1e-6)  # place 0.10 · 14 of 13
    assert high == pytest.approx(1.21 * (1.22 / 1.21) ** 0.60, rel=1e-6)


def test_fit_probability_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three runs, one used a quarter more than predicted; 70 GiB would then be 87.5: (2 + 1) / (3 + 2)."""
    memory = [{"id": str(x), "source": "a/a", "log": math.log(x)} for x in (0.95, 1.0, 1.25)]
    monkeypatch.setattr(ranges, "_residuals", lambda: {"time": rows(MIN_SIMILAR_RUNS), "memory": memory})
    assert estimate_range(JOB, ONE_SECOND, 70.0, 80.0).fit_probability == pytest.approx(3 / 5)
