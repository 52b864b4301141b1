"""What `bench layouts` shows: a table that is redrawn, lines where nobody watches, and how it ends in words."""

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
def asked(plan: Plan) -> CandidateSet:
    return layouts.varied(plan, layouts.base_request(plan, None, 4, 0), "mbs=1:2:4,mbs=3", Cluster.load("2xh100"))


def rows(asked: CandidateSet, *records: TrialRecord | None) -> tuple[TrialRow, ...]:
    return tuple(TrialRow(one, record or layouts.NOT_OFFERED) for one, record in zip(asked.candidates, records, strict=True))


RECORDS = (
    TrialRecord(0, "measured", 1000.0, 0.25),
    TrialRecord(1, "failed", kind="out of memory", reason="rank 1 ran out of memory at step 2"),
    TrialRecord(2, "stopped early", 500.0, reason="stopped after step 4"),
)


def shown(asked: CandidateSet, *records: TrialRecord | None) -> str:
    text, found = StringIO(), rows(asked, *records)
    show.show_layouts(Console(file=text, width=250), asked, found, verdict(found), None)
    return text.getvalue()


def test_the_table_tells_of_every_end(asked: CandidateSet) -> None:
    said = shown(asked, *RECORDS)
    for word in (
        "0.50×",
        "failed: out of memory",
        "mbs=1: out of memory: rank 1 ran out",
        "stopped early",
        "0.2500",
        "mbs=3: ",
    ):
        assert word in said, word
    assert "It is the plan: no regret" in said
    predicted = asked.candidates[0].predicted
    assert predicted is not None
    assert f"{predicted.tokens_per_s / 1000 - 1:+.0%}" in said


def test_regret_is_how_much_slower_the_first_was(asked: CandidateSet) -> None:
    """800 of 1000 tokens/s is a fifth less."""
    faster = TrialRecord(1, "measured", 1000.0)
    race = replace(asked, ranked=True)
    assert "The planner's first choice is 20.0% slower" in shown(race, TrialRecord(0, "measured", 800.0), faster, None)
    assert "the planner's first choice failed (crashed)" in shown(race, replace(RECORDS[1], kind="crashed"), faster, None)
    said = shown(asked, None, faster, None)
    assert "the plan was not measured" in said
    assert "2 of 3 are still to measure" in said
    assert "nothing was measured to its end" in shown(asked, RECORDS[1], None, None)


def watched(asked: CandidateSet, monkeypatch: pytest.MonkeyPatch, **console: Any) -> str:
    text = StringIO()
    monkeypatch.setattr(show, "terminal", lambda to_errors: Console(file=text, width=200, **console))
    with show.watching(asked) as changed:
        for records, doing, step, eta_s in (
            ((RECORDS[0], None, None), "mbs=1", 3, None),
            (RECORDS, "", 0, 150.0),
            (RECORDS, "", 0, 150.0),
        ):
            changed(SimpleNamespace(rows=rows(asked, *records), doing=doing, step=step, candidate_set=asked, eta_s=eta_s))
    return text.getvalue()


def test_on_a_terminal_the_table_is_redrawn(asked: CandidateSet, monkeypatch: pytest.MonkeyPatch) -> None:
    said = watched(asked, monkeypatch, force_terminal=True)
    assert "mbs=1: step 3 of 4; 1 of 3" in said
    assert "3 of 3, about 2 min left" in said
    assert said.count("tokens/s predicted") >= 3


def test_elsewhere_each_end_is_a_line(asked: CandidateSet, monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched(asked, monkeypatch).splitlines() == [
        "known: the plan: 1,000 tokens/s; 1 of 3",
        "mbs=1: failed, out of memory: rank 1 ran out of memory at step 2; 3 of 3, about 2 min left",
        "mbs=4: stopped after step 4: 500 tokens/s; 3 of 3, about 2 min left",
    ]


def test_ctrl_c_ends_with_a_table_and_a_word(plan: Plan, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(machine, "gpu_names", list)
    monkeypatch.setattr(launcher, "detect_cluster", lambda *_: None)
    monkeypatch.setattr(trial, "run", interrupted)
    code, out, said = run("bench", "layouts", plan.save(tmp_path / "plan.yaml"), "--vary", "mbs", "-o", tmp_path / "out")
    assert code == 1
    assert "failed: interrupted" in out
    assert "stopped by Ctrl-C: measured trials are kept" in said


def test_links_of_several_gpus_become_constants(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def measure(*words: Any) -> CollectivesReport:
        asked.append(words[:5])
        return CollectivesReport(
            "2 GPUs over NCCL", tuple(CollectiveTiming("all_reduce", 2, size, 1.0, 1.0, 1.0) for size in (1024, 2**28))
        )

    monkeypatch.setattr(machine, "gpu_names", lambda: ["NVIDIA H200"] * 2)
    monkeypatch.setattr(hardware, "measured", lambda cluster: cluster)
    monkeypatch.setattr(collectives_timed, "measure", measure)
    code, _, said = run("bench", "hardware", "--nproc", "2", "-o", tmp_path / "cluster.yaml")
    assert code == 0, said
    assert asked[0][0] == ["all_reduce"]
    assert asked[0][2:] == ([2], 2, True)
    assert Cluster.load(tmp_path / "cluster.yaml").efficiency.link_bandwidth == pytest.approx(1e-3, rel=1)  # a crawl
