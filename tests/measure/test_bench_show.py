"""What `bench layouts` prints: a table that is redrawn, lines where there is no terminal, and a closing message."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from conftest import Run
from ultrascale.cost.estimate import estimate
from ultrascale.launch import launcher, machine
from ultrascale.measure import bench_collectives as collectives_timed
from ultrascale.measure import bench_hardware as hardware
from ultrascale.measure import bench_layouts as layouts
from ultrascale.measure import bench_trial as trial
from ultrascale.measure.bench_collectives import CollectivesReport, CollectiveTiming
from ultrascale.measure.bench_layouts import CandidateSet, TrialRecord, TrialRow, verdict
from ultrascale.show import bench as show
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.plan import Plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    job = Job(model=Model.load("tiny"), cluster=Cluster.load("2xh100"), seq=64, batch_tokens=8 * 64, precision="fp32")
    layout = Layout(dp=2, mbs=2, gas=2)
    return Plan(job=job, layout=layout, estimate=estimate(job, layout))


@pytest.fixture(scope="module")
def candidates(plan: Plan) -> CandidateSet:
    return layouts.varied(plan, layouts.base_request(plan, None, 4, 0), "mbs=1:2:4,mbs=3", Cluster.load("2xh100"))


def rows(candidates: CandidateSet, *records: TrialRecord | None) -> tuple[TrialRow, ...]:
    return tuple(
        TrialRow(one, record or layouts.NOT_OFFERED) for one, record in zip(candidates.candidates, records, strict=True)
    )


RECORDS = (
    TrialRecord(0, "measured", 1000.0, 0.25),
    TrialRecord(1, "failed", kind="out of memory", reason="rank 1 ran out of memory at step 2"),
    TrialRecord(2, "stopped early", 500.0, reason="stopped after step 4"),
)


def shown(candidates: CandidateSet, *records: TrialRecord | None) -> str:
    text, found = StringIO(), rows(candidates, *records)
    show.show_layouts(Console(file=text, width=250), candidates, found, verdict(found), None)
    return text.getvalue()


def test_the_table_shows_every_result(candidates: CandidateSet) -> None:
    output = shown(candidates, *RECORDS)
    for word in (
        "0.50×",
        "failed: out of memory",
        "mbs=1: out of memory: rank 1 ran out",
        "stopped early",
        "0.2500",
        "mbs=3: ",
    ):
        assert word in output, word
    assert "It is the plan: no regret" in output
    predicted = candidates.candidates[0].predicted
    assert predicted is not None
    assert f"{predicted.tokens_per_s / 1000 - 1:+.0%}" in output


def test_regret_is_the_slowdown_of_the_first_choice(candidates: CandidateSet) -> None:
    """800 of 1000 tokens/s is a fifth less."""
    faster = TrialRecord(1, "measured", 1000.0)
    race = replace(candidates, ranked=True)
    assert "The planner's first choice is 20.0% slower" in shown(race, TrialRecord(0, "measured", 800.0), faster, None)
    assert "the planner's first choice failed (crashed)" in shown(race, replace(RECORDS[1], kind="crashed"), faster, None)
    output = shown(candidates, None, faster, None)
    assert "the plan was not measured" in output
    assert "2 of 3 are still to measure" in output
    assert "nothing was measured to its end" in shown(candidates, RECORDS[1], None, None)


def watched(candidates: CandidateSet, monkeypatch: pytest.MonkeyPatch, **console: Any) -> str:
    text = StringIO()
    monkeypatch.setattr(show, "terminal", lambda to_errors: Console(file=text, width=200, **console))
    with show.watching(candidates) as changed:
        for records, doing, step, eta_s in (
            ((RECORDS[0], None, None), "mbs=1", 3, None),
            (RECORDS, "", 0, 150.0),
            (RECORDS, "", 0, 150.0),
        ):
            changed(
                SimpleNamespace(rows=rows(candidates, *records), doing=doing, step=step, candidate_set=candidates, eta_s=eta_s)
            )
    return text.getvalue()


def test_on_a_terminal_the_table_is_redrawn(candidates: CandidateSet, monkeypatch: pytest.MonkeyPatch) -> None:
    output = watched(candidates, monkeypatch, force_terminal=True)
    assert "mbs=1: step 3 of 4; 1 of 3" in output
    assert "3 of 3, about 2 min left" in output
    assert output.count("tokens/s predicted") >= 3


def test_without_a_terminal_each_result_is_a_line(candidates: CandidateSet, monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched(candidates, monkeypatch).splitlines() == [
        "known: the plan: 1,000 tokens/s; 1 of 3",
        "mbs=1: failed, out of memory: rank 1 ran out of memory at step 2; 3 of 3, about 2 min left",
        "mbs=4: stopped after step 4: 500 tokens/s; 3 of 3, about 2 min left",
    ]


def test_ctrl_c_prints_the_table_and_a_message(plan: Plan, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(machine, "gpu_names", list)
    monkeypatch.setattr(launcher, "detect_cluster", lambda *_: None)
    monkeypatch.setattr(trial, "run", interrupted)
    code, out, err = run("bench", "layouts", plan.save(tmp_path / "plan.yaml"), "--vary", "mbs", "-o", tmp_path / "out")
    assert code == 1
    assert "failed: interrupted" in out
    assert "stopped by Ctrl-C: measured trials are kept" in err


def test_links_of_several_gpus_become_constants(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def measure(*words: Any) -> CollectivesReport:
        calls.append(words[:5])
        return CollectivesReport(
            "2 GPUs over NCCL", tuple(CollectiveTiming("all_reduce", 2, size, 1.0, 1.0, 1.0) for size in (1024, 2**28))
        )

    monkeypatch.setattr(machine, "gpu_names", lambda: ["NVIDIA H200"] * 2)
    monkeypatch.setattr(hardware, "measured", lambda cluster: cluster)
    monkeypatch.setattr(collectives_timed, "measure", measure)
    code, _, err = run("bench", "hardware", "--nproc", "2", "-o", tmp_path / "cluster.yaml")
    assert code == 0, err
    assert calls[0][0] == ["all_reduce"]
    assert calls[0][2:] == ([2], 2, True)
    assert Cluster.load(tmp_path / "cluster.yaml").efficiency.link_bandwidth == pytest.approx(1e-3, rel=1)  # a crawl
