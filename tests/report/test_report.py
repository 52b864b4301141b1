"""The page stands alone, shows the plan's numbers, and cannot be broken by a name."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from ultrascale import Cluster, Job, Layout, Model, Plan, SpecError, estimate
from ultrascale.figures import style
from ultrascale.report.of_plan import plan_page
from ultrascale.report.of_run import metrics, run_page
from ultrascale.report.page import chart, tiles
from ultrascale.specs.measurement import MeasuredMemory, MeasuredStage, MeasuredTime, Measurement
from ultrascale.specs.units import seconds

pytest.importorskip("plotly")


@pytest.fixture(scope="module")
def plan() -> Plan:
    job = Job(model=Model.load("smollm2-135m"), cluster=Cluster.load("2xh100"), seq=2048, batch_tokens=2**14)
    layout = Layout(pp=2, gas=8, zero=0)
    return Plan(job=job, layout=layout, estimate=estimate(job, layout), reasons=("Step 1, fit: <b>&</b>",))


def body(page: str) -> str:
    """The page less Plotly's own source."""
    return re.sub(r"<script>.{100000,}?</script>", "", page, flags=re.DOTALL)


def test_a_plan_in_one_file(plan: Plan) -> None:
    page = plan_page(plan, "plan.yaml")
    assert seconds(plan.estimate.step_time_s) in page
    assert "Step 1, fit: &lt;b&gt;&amp;&lt;/b&gt;" in page
    figures = re.findall(r'<script type="application/json" id="([a-z-]+)">(.*?)</script>', page)
    assert {name for name, _ in figures} >= {
        "memory-by-stage",
        "memory-over-step",
        "time-by-cause",
        "schedule",
        "front",
        "scaling",
        "heat-map",
    }
    for _, data in figures:
        assert json.loads(data)["data"]
    assert not re.search(r'(?:src|href)="(?!#)', body(page)), "nothing is fetched"


@pytest.mark.slow
def test_a_page_of_a_large_cluster_takes_seconds() -> None:
    job = Job(model=Model.load("llama-3-70b"), cluster=Cluster.load("2048xh100"), seq=8192, batch_tokens=2**24)
    layout = Layout(dp=1024, tp=2, zero=3, gas=2, recompute="selective")
    started = time.process_time()
    page = plan_page(Plan(job=job, layout=layout, estimate=estimate(job, layout)), "plan.yaml")
    assert time.process_time() - started < 40, "11 s on an idle machine, about 200 s if every layout is evaluated"
    assert "try mbs 1, 2, 4; tp 1, 2, 4, 8, 16;" in page


@pytest.mark.slow
def test_a_name_is_escaped(plan: Plan) -> None:
    evil = "</script><script>alert(1)</script>"
    named = plan.job.changed(model=plan.job.model.model_copy(update={"name": evil}))
    page = plan_page(plan.model_copy(update={"job": named}), "plan.yaml")
    assert "<script>alert(1)" not in body(page)


def test_a_title_cannot_close_its_script_element() -> None:
    written = chart(style.new_figure("</script><script>alert(1)</script>"), "one")
    assert "<script>alert(1)" not in written
    (data,) = re.findall(r'id="one">(.*?)</script>', written)
    assert json.loads(data)["layout"]["title"]["text"] == "</script><script>alert(1)</script>"


def test_tiles_show_how_much_and_of_what() -> None:
    assert re.search(r"<b>1 &lt; 2</b><span>a &amp; b</span>", tiles([("a & b", "1 < 2")]))


@pytest.fixture
def run(plan: Plan, tmp_path: Path) -> Path:
    folder = tmp_path / "first"
    folder.mkdir()
    plan.save(folder / "plan.yaml")
    rows = [{"step": n, "loss": 5.0 / n, "tokens_per_s_per_gpu": 100.0} for n in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def measured() -> Measurement:
    memory = MeasuredMemory(parameters=1e9, master=0, gradients=1e9, optimizer=2e9, activations=3e9, buffers=0)
    return Measurement(
        step_time_s=2.5, tokens_per_s=100.0, tokens_per_s_per_gpu=12.5, model_tflops_per_gpu=1.0, peak_gib=6.5, peak_stage=0,
        memory=tuple(MeasuredStage(stage=n, layers=8, memory=memory) for n in (0, 1)), time=MeasuredTime(computing_s=2.0),
        steps=3, processes=8, device="cpu",
    )  # fmt: skip


def test_a_run_compared_with_its_plan(run: Path) -> None:
    measured().save(run / "measurement.json")
    page = run_page(run)
    assert "Predicted and measured" in page
    assert "2.50 s" in page
    assert 'id="loss"' in page


@pytest.mark.slow
def test_a_run_in_progress(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    page = run_page(run)
    assert "There is no measurement.json" in page
    assert len(metrics(run / "metrics.jsonl")) == 3


def test_broken_folders(run: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no plan\.yaml"):
        run_page(tmp_path)
    (run / "metrics.jsonl").write_text('{"step": 1}\nnothing\n{"step": 2}\n')
    with pytest.raises(SpecError, match="line 2 is not JSON"):
        run_page(run)
    (run / "metrics.jsonl").write_text("[1]\n{}\n")
    with pytest.raises(SpecError, match="line 1 has no step"):
        run_page(run)
    (run / "metrics.jsonl").write_bytes(b"\x87\xff")
    with pytest.raises(SpecError, match=r"metrics\.jsonl is not text: expected the metrics"):
        run_page(run)
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    with pytest.raises(SpecError, match=r"metrics\.jsonl is a folder: expected"):
        run_page(run)
