"""Constants without one source: nothing changes without multipliers, each moves what it names, and every source has its own."""

from __future__ import annotations

import json
import math
import runpy
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from row_builders import PUBLISHED

from builders import make_job
from ultrascale.cost.estimate import estimate
from ultrascale.cost.legality import problem
from ultrascale.measure.accuracy.runs import read
from ultrascale.measure.accuracy.scores import adjusted, left_out_multipliers, measured_rate, source_group
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout

_TOOL = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools" / "fit_constants.py"))
FITTED, current = _TOOL["FITTED"], _TOOL["current"]

# Two nodes: TP collectives over the fast link, gradients over the network; enough tokens that no engine's host is late.
ACROSS = Layout(dp=2, tp=8, mbs=4, gas=2)
ALONE = Layout(gas=2)


def job_on(gpu: str, layout: Layout = ACROSS, framework: str = "playbook", **fields: Any) -> Job:
    engine = Framework.load(framework)
    model = "llama-3-8b" if layout.gpus > 1 else "llama-3.2-1b"
    attention = "plain" if engine.attention.startswith("plain") else "flash"
    return make_job(model, f"{layout.gpus}x{gpu}", 4096, layout, engine, attention=attention, **fields)


def step_s(what: Job, layout: Layout, **multipliers: float) -> float:
    return estimate(adjusted(what, {name.replace("__", "."): value for name, value in multipliers.items()}), layout).step_time_s


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("gpu", ["h100", "h200", "h100-96", "b200", "mi300x"])
def test_no_multipliers_change_no_prediction(gpu: str, precision: str) -> None:
    what = job_on(gpu, precision=precision)
    assert estimate(adjusted(what, {}), ACROSS).step_time_s == pytest.approx(estimate(what, ACROSS).step_time_s, rel=1e-9)


@pytest.mark.parametrize("gpu", ["a100-40", "a100-80", "h100"])
@pytest.mark.parametrize("framework", sorted(Framework.presets()))
def test_no_multipliers_change_no_engine(gpu: str, framework: str) -> None:
    what = job_on(gpu, framework=framework)
    before, after = estimate(what, ACROSS), estimate(adjusted(what, {}), ACROSS)
    assert after.step_time_s == pytest.approx(before.step_time_s, rel=1e-9)
    assert after.peak_gib == before.peak_gib


# name: a job that uses it, a job that does not, and whether more of it makes a step slower
USES: dict[str, tuple[Job, Job | None, bool]] = {
    "sustained.ampere.bf16": (job_on("a100-80"), job_on("h100"), False),
    "sustained.hopper.bf16": (job_on("h100"), job_on("a100-80"), False),
    "sustained.blackwell.bf16": (job_on("b200"), job_on("h100"), False),
    "sustained.hopper.fp8": (job_on("h100", precision="fp8"), job_on("h100"), False),
    "sustained.blackwell.fp8": (job_on("b200", precision="fp8"), job_on("b200"), False),
    "elementwise.fsdp1-eager": (job_on("h100", framework="fsdp1-eager"), job_on("h100", framework="eager"), True),
    "elementwise.eager": (job_on("h100", framework="eager"), job_on("h100"), True),
    "elementwise.megatron-core": (job_on("h100", framework="megatron-core"), job_on("h100", framework="megatron-2021"), True),
    "elementwise.megatron-2021": (
        job_on("a100-80", framework="megatron-2021"),
        job_on("h100", framework="megatron-core"),
        True,
    ),
    "elementwise.nanotron": (job_on("h100", framework="nanotron"), job_on("h100", framework="torchtitan"), True),
    "attention.flash.ampere": (job_on("a100-80"), job_on("h100"), False),
    "attention.flash.hopper": (job_on("h100"), job_on("h100", framework="nanotron"), False),
    "attention.flash.blackwell": (job_on("b200"), job_on("h100"), False),
    "attention.flash-1.ampere": (job_on("a100-80", framework="fsdp1-eager"), job_on("a100-80"), False),
    "attention.flash-1.hopper": (job_on("h100", framework="fsdp1-eager"), job_on("h100"), False),
    "attention.flash-2.hopper": (job_on("h100", framework="nanotron"), job_on("h100"), False),
    "memory_bandwidth": (job_on("h100"), None, False),  # every step streams
    "link_bandwidth": (job_on("h100"), job_on("h100", ALONE), False),
    "network_bandwidth": (job_on("h100"), job_on("h100", ALONE), False),
    "overlap_slowdown": (job_on("h100"), job_on("h100", ALONE), True),
}


def test_every_fitted_constant_has_its_jobs_here() -> None:
    assert set(USES) == set(FITTED)


@pytest.mark.parametrize("name", FITTED)
def test_a_constant_changes_the_step_time_in_the_right_direction(name: str) -> None:
    uses, _, slower = USES[name]
    less, same, more = (step_s(uses, ACROSS, **{name: value}) for value in (0.9, 1.0, 1.1))
    assert (less < same < more) if slower else (less > same > more)


@pytest.mark.parametrize("name", [name for name, (_, other, _) in USES.items() if other is not None])
def test_a_constant_does_not_change_jobs_that_do_not_use_it(name: str) -> None:
    other = USES[name][1]
    assert other is not None
    layout = ALONE if other.cluster.gpus == 1 else ACROSS
    assert step_s(other, layout, **{name: 1.3}) == step_s(other, layout)


@pytest.mark.parametrize(
    ("framework", "family"), [("torchtitan-eager", "eager"), ("deepspeed", "eager"), ("megatron-no-overlap", "megatron-core")]
)
def test_engines_of_one_family_share_their_constant(framework: str, family: str) -> None:
    what = job_on("h100", framework=framework)
    assert step_s(what, ACROSS, **{f"elementwise.{family}": 1.2}) > step_s(what, ACROSS)


def test_the_given_job_is_not_modified() -> None:
    what = job_on("h100")
    before = what.model_dump()
    adjusted(what, dict.fromkeys(FITTED, 1.2))
    assert what.model_dump() == before


@pytest.mark.parametrize("name", FITTED)
def test_a_constant_in_use_is_near_its_figure_before_any_fit(name: str) -> None:
    """Twice or half is where a fitted figure stops being the physics it is named after."""
    prior, spread = FITTED[name]
    assert 0 < spread < 1
    assert 0.5 <= current(name) / prior <= 2.0


@pytest.fixture(scope="module")
def sources() -> set[str]:
    """Of the published rows that can be compared."""
    runs, _ = read(PUBLISHED)
    return {
        source_group(run)
        for run in runs
        if run.job is not None and run.layout is not None and measured_rate(run) and problem(run.job, run.layout) is None
    }


def test_every_source_has_its_multipliers_and_no_other_has(sources: set[str]) -> None:
    assert set(left_out_multipliers()) == sources


def test_multipliers_name_fitted_constants_and_are_moderate() -> None:
    for source, multipliers in left_out_multipliers().items():
        assert set(multipliers) <= set(FITTED), source
        assert all(0.4 < value < 2.5 for value in multipliers.values()), source


def test_ranges_use_the_same_sources(sources: set[str]) -> None:
    text = resources.files("ultrascale.cost").joinpath("surfaces/residuals.json").read_text(encoding="utf-8")
    residuals = json.loads(text)
    assert {row["source"] for row in residuals["time"]} == sources
    assert {row["source"] for row in residuals["memory"]} <= sources
    assert all(math.isfinite(row["log"]) for kind in ("time", "memory") for row in residuals[kind])
