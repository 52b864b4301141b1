"""The cheat-sheet with a plan's numbers in it: rows, verdicts and the useful formulas."""

from __future__ import annotations

import re

import pytest

from builders import make_plan
from ultrascale.cost.cheatsheet import formulas, strategies
from ultrascale.specs.layout import Layout
from ultrascale.specs.plan import Plan

LLAMA = make_plan(Layout(dp=2, tp=8, pp=4, gas=16, zero=1), "llama-3-70b", "64xh100", 8192)
MIXTRAL = make_plan(Layout(dp=64, ep=8, zero=1, gas=4), "mixtral-8x7b", "64xh100", 4096)


def test_the_cheatsheet_has_every_row() -> None:
    names = ["Data parallelism", "DP + ZeRO-1", "DP + ZeRO-2", "DP + ZeRO-3", "Tensor parallelism"]
    names += ["Pipeline parallelism", "Context parallelism"]
    assert [row.name for row in strategies(LLAMA)] == names
    assert [row.name for row in strategies(MIXTRAL)] == [*names, "Expert parallelism"]
    for row in strategies(LLAMA) + strategies(MIXTRAL):
        assert all((row.degree, row.batch, row.memory, row.compute, row.communication, row.verdict))


def test_techniques_not_in_use_are_marked() -> None:
    verdicts = {row.name: row.verdict for row in strategies(MIXTRAL)}
    for name in ("Tensor parallelism", "Pipeline parallelism", "Context parallelism"):
        assert verdicts[name] == "not used"
    assert verdicts["Expert parallelism"] != "not used"


def test_the_tensor_ratio_of_llama_70b() -> None:
    """2·h·(TP−1)·peak / (layer·bw): 2·8192·7·989.4e12 / (855,638,016 · bw); bw is the measured all-gather rate, 410 GB/s."""
    ratio = next(row.overlap for row in strategies(LLAMA) if row.name == "Tensor parallelism")
    rate = 2 * 8192 * 7 * LLAMA.job.peak_flops / (855_638_016 * ratio.corrected)
    assert rate == pytest.approx(410e9, rel=0.02)


def test_tensor_ratio_of_moe_counts_active_experts_only() -> None:
    """Mixtral with tp 8: attention 41,943,040, router 32,768 and two of eight experts, 2·176,160,768: not all eight."""
    plan = make_plan(Layout(dp=8, tp=8, ep=8, zero=1, gas=4), "mixtral-8x7b", "64xh100", 4096)
    ratio = next(row.overlap for row in strategies(plan) if row.name == "Tensor parallelism")
    active_parameters = 41_943_040 + 32_768 + 2 * 176_160_768
    rate = 2 * 4096 * 7 * plan.job.peak_flops / (active_parameters * ratio.corrected)
    assert rate == pytest.approx(410e9, rel=0.02)


def test_data_ratio_of_moe_counts_all_gradients_and_active_flops() -> None:
    """Mixtral with plain data parallelism: 46.70e9 gradients, 12.88e9 active parameters: 3.63 times a dense ratio."""
    plan = make_plan(Layout(dp=8, gas=4), "mixtral-8x7b", "8xh200", 4096)
    ratio = next(row.overlap for row in strategies(plan) if row.name == "Data parallelism")
    dense = 7 / 8 * plan.job.peak_flops / 4096
    rate = dense * (46_702_792_704 / 12_879_925_248) / ratio.corrected
    assert rate == pytest.approx(414e9, rel=0.02)


def value(plan: Plan, name: str) -> str:
    return next(formula.value for formula in formulas(plan) if formula.name == name)


def test_the_useful_formulas() -> None:
    """Llama-3-70B: 2·70,553,706,496 bytes = 131.42 GiB; printed 2·80·16·8192² = 160.00 GiB; 1·2·16·8192 tokens a batch."""
    assert value(LLAMA, "parameters, exact") == "70,553,706,496"
    assert value(LLAMA, "model_bf16") == "131.42 GiB"
    assert value(LLAMA, "model_bf16, printed") == "160.00 GiB"
    assert value(LLAMA, "global batch") == "1·2·16·8192 = 262,144 tokens"
    assert value(LLAMA, "bubble") == "18.75%"  # 3/16
    # 6 · 70.55e9 · 262,144 / 64 = 1.734e15; printed with bytes: 6 · 141.1e9 · 8192 · 16 = 1.11e17
    assert float(re.match(r"[\d.e+]+", value(LLAMA, "compute, corrected"))[0]) == pytest.approx(1.73e15, rel=0.005)
    assert float(value(LLAMA, "compute, printed")) == pytest.approx(1.11e17, rel=0.005)


def test_approximate_parameters_of_llama_70b() -> None:
    """128256·8192 + 80·(12·8192² + 13·8192) + 2·8192 = 1,050,673,152 + 80·805,412,864 + 16,384."""
    assert value(LLAMA, "parameters, approximate") == f"{1_050_673_152 + 80 * 805_412_864 + 16_384:,}"


def test_memory_formulas_are_the_peak_stages() -> None:
    peak = LLAMA.estimate.memory[LLAMA.estimate.peak_stage].memory
    assert value(LLAMA, "model_bf16 on a GPU") == f"{peak.parameters / 2**30:,.2f} GiB"
    assert value(LLAMA, "optimstates on a GPU") == f"{peak.optimizer / 2**30:,.2f} GiB"
    # ZeRO-1 over dp = 2: master is 2·model_bf16 / 2, optimizer 4·model_bf16 / 2
    assert peak.master == pytest.approx(peak.parameters)
    assert peak.optimizer == pytest.approx(2 * peak.parameters)


def test_only_the_zero_stage_in_use_has_traffic() -> None:
    plan = make_plan(Layout(dp=8, zero=3, gas=4), "llama-3-8b", "8xh100", 8192)
    rows = {one.name: one for one in strategies(plan) if "ZeRO" in one.name}
    assert {name: one.degree for name, one in rows.items()} == {
        "DP + ZeRO-1": "not in use",
        "DP + ZeRO-2": "not in use",
        "DP + ZeRO-3": "in use",
    }
    assert [one.communication.endswith("none here") for one in rows.values()] == [True, True, False]
