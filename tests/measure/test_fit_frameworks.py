"""Presets of other engines beside stored rehearsals of these engines (tools/fit_frameworks.py)."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ultrascale.specs.files import package_data
from ultrascale.specs.framework import Framework
from ultrascale.specs.model import Model

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "fit_frameworks.py"


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("fit_frameworks", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["fit_frameworks"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OLD = ("torchtitan-0.2", "torchtitan-0.2-eager")
PRESETS = ("torchtitan", "torchtitan-eager", "accelerate", "deepspeed", "megatron-local")
PEAK = {"accelerate": 0.041, "deepspeed": 0.001, "megatron-local": 0.02}
"""DDP under autocast keeps norms' outputs in fp32; what Megatron's interleaved schedule holds of sends and receives"""
NUMBERS = 150
"""bytes of norms, of each tensor's gradient too, of losses and overflows, for each layer: no technique sends these"""
COUNTS = 16
"""bytes for each expert of a layer: how many rows it had, summed over data ranks and over tp, in fp32 (torchtitan's balance)"""


@pytest.mark.parametrize("preset", PRESETS + OLD)
def test_peaks_flops_and_bytes_sent_are_those_of_rehearsals(preset: str, tool: Any) -> None:
    rows, framework = tool.stored(preset), Framework.load(preset)
    assert [str(case) for case, _ in rows] == [str(case) for case in tool.GRIDS[preset]]
    found = [tool.difference(framework, case, rehearsed) for case, rehearsed in rows]
    peaks = [abs(one.peak) for one in found]
    assert max(peaks) < PEAK.get(preset, 0.025)
    assert sum(peaks) / len(peaks) < min(0.01, PEAK.get(preset, 0.01))
    assert max(abs(one.flops) for one in found) <= 1e-12
    for one, (case, _) in zip(found, rows, strict=True):
        moe = Model.load(case.model).moe
        assert one.sent_bytes < (NUMBERS + COUNTS * (moe.experts if moe else 0)) * case.layers
    lines = map(json.loads, (ROOT / "benchmarks" / "gpu" / "engines_h200.json").read_text().splitlines())
    on_gpu = {line["layout"]: line["peak_bytes"] for line in lines if "peak_bytes" in line}
    for (case, rehearsed), one in zip(rows, found, strict=True):
        measured = on_gpu.get(f"{preset}: {case}")
        if measured is not None:
            assert rehearsed.peak / measured - 1 == pytest.approx(0, abs=0.014)
            assert rehearsed.peak * (1 + one.peak) / measured - 1 == pytest.approx(0, abs=0.028)


def test_no_field_of_memory_or_traffic_is_set_by_hand(tool: Any) -> None:
    """Others set times, or formats in fp8, which no rehearsal shows."""
    times = {"elementwise", "launch", "launch_sharded", "launch_tensor", "overlap", "expert_overlap", "routing", "fp8_gather"}
    presets = package_data("ultrascale.specs", "presets/frameworks.yaml")
    for preset in PRESETS + OLD:
        assert presets[preset].keys() <= {"engine", "source", "seen"} | times | tool.CANDIDATES.keys()


def test_the_versions_rehearsed_are_in_the_preset(tool: Any) -> None:
    for preset in PRESETS + OLD:
        engines = {rehearsed.engine for _, rehearsed in tool.stored(preset)}
        assert all(engine in Framework.load(preset).seen for engine in engines)


def test_estimates_are_those_of_layouts_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which no preset was fitted to (benchmarks/gpu/foreign.py)."""
    folder = ROOT / "benchmarks" / "gpu"
    monkeypatch.syspath_prepend(folder)
    foreign = importlib.import_module("foreign")
    measured = foreign.peaks_of(folder / "foreign_h200.json")
    cases = foreign.cases()
    assert {case.name for case in cases} == measured.keys()
    differences = [abs(case.estimate_gib() / measured[case.name] - 1) for case in cases]
    assert max(differences) < 0.06
    assert sum(differences) / len(differences) < 0.015


def test_a_field_is_found_from_rehearsals(tool: Any) -> None:
    rows = tool.stored("accelerate")[1:3]
    wrong = Framework.load("accelerate").model_copy(update={"norm": "fused", "loss": "fused"})
    values = {"norm": ("fused", "fp32"), "loss": ("fused", "fp32", "log-softmax"), "accumulation": ("stepped",)}  # for gas 1
    found = tool.fit(wrong, rows, values)
    assert (found.norm, found.loss) == ("fp32", "log-softmax")
    assert tool.cost(found, rows) < tool.cost(wrong, rows)


def test_fields_are_written_into_the_preset_alone(tool: Any) -> None:
    text = tool.PRESETS.read_text(encoding="utf-8")
    changed = Framework.load("accelerate").model_copy(update={"norm": "fused", "loss": "fp32", "seen": "accelerate 2"})
    written = tool.written(text, changed, ("norm", "loss"))
    assert {line for line in text.splitlines() if line.startswith("#")} <= set(written.splitlines())
    before = package_data("ultrascale.specs", "presets/frameworks.yaml")
    after = yaml.safe_load(written)
    expected = {**before["accelerate"], "loss": "fp32", "seen": "accelerate 2"}
    del expected["norm"]
    assert after == {**before, "accelerate": expected}


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_a_rehearsal_repeats(preset: str, tool: Any) -> None:
    """With the versions that are installed."""
    case, before = tool.stored(preset)[0]
    pytest.importorskip(Framework.load(preset).engine)
    found = tool.rehearse(preset, case)
    assert (found.engine, found.peak, found.flops) == (before.engine, before.peak, before.flops)
    assert found.collectives == before.collectives
