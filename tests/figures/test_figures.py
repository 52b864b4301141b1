"""Pictures show the numbers of the plan: heights, labels, units, and nothing drawn twice."""

from __future__ import annotations

import pytest

from builders import make_job
from ultrascale import Cluster, Job, Layout, Model, Plan, SpecError, estimate, plan
from ultrascale.cost.timeline import simulated
from ultrascale.figures import plan as plan_figures
from ultrascale.figures import runs as run_figures
from ultrascale.figures import search as search_figures
from ultrascale.figures import style
from ultrascale.measure import compare
from ultrascale.measure.trace_steps import CommInterval, StepIntervals
from ultrascale.plan import survey
from ultrascale.plan.reasons import neighbours
from ultrascale.schedules.actions import ActionKind
from ultrascale.specs.framework import Framework
from ultrascale.specs.units import GIB

pytest.importorskip("plotly")


@pytest.fixture(scope="module")
def job() -> Job:
    return make_job("llama-3.2-1b", "16xh100", 4096)


def plan_of(job: Job, **fields: object) -> Plan:
    layout = Layout(**fields)  # type: ignore[arg-type]
    found = estimate(job, layout)
    return Plan(job=job, layout=layout, estimate=found, rejected=neighbours(job, layout, found))


@pytest.fixture(scope="module")
def four_stages(job: Job) -> Plan:
    return plan_of(job, dp=4, pp=4, gas=16, schedule="dualpipe-v", virtual_stages=2, zero=1)


def test_memory_bars_add_up_to_each_stage(four_stages: Plan) -> None:
    figure = plan_figures.memory_by_stage(four_stages)
    for place, stage in enumerate(four_stages.estimate.memory):
        assert sum(trace.y[place] for trace in figure.data) == pytest.approx(stage.total_gib)
    assert figure.layout.shapes[0].y0 == four_stages.estimate.capacity_gib
    assert "GiB" in figure.layout.yaxis.title.text


def test_memory_over_a_step_reaches_the_peak(four_stages: Plan) -> None:
    stage = four_stages.estimate.peak_stage
    figure = plan_figures.memory_over_step(four_stages)
    totals = [sum(trace.y[i] for trace in figure.data) for i in range(len(figure.data[0].x))]
    memory = four_stages.estimate.memory[stage].memory
    assert max(totals) == pytest.approx((memory.total - memory.runtime) / GIB, rel=0.02)


def test_time_bars_add_up_to_the_step(four_stages: Plan) -> None:
    figure = plan_figures.time_by_cause(four_stages)
    assert sum(sum(trace.x) for trace in figure.data) * {"time (s)": 1, "time (ms)": 1e-3}[
        figure.layout.xaxis.title.text
    ] == pytest.approx(four_stages.estimate.time.total)
    labels = [label for trace in figure.data for label in trace.y]
    assert len(labels) == len(set(labels))


def test_the_gantt_draws_every_action_once_and_pairs_in_halves(four_stages: Plan) -> None:
    timeline = simulated(four_stages.job, four_stages.layout)
    figure = plan_figures.schedule(four_stages)
    bars = {trace.name: trace for trace in figure.data}
    forwards = [event for event in timeline.events if event.action.kind is ActionKind.F]
    assert len(bars["forward"].x) == len(forwards)
    assert sum(len(trace.x) for name, trace in bars.items() if name != "bubble") == len(timeline.events)
    spans = [(event.rank, event.start_s, event.end_s) for event in timeline.events]
    halves = sum(width < 0.5 for name, trace in bars.items() if name != "bubble" for width in trace.width)
    assert halves == sum(spans.count(span) > 1 for span in spans)
    assert halves > 0
    assert f"{timeline.bubble_fraction:.1%}" in figure.layout.title.text


def test_a_long_step_is_truncated_and_the_title_says_so(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_figures, "MOST_BARS", 50)
    figure = plan_figures.schedule(plan_of(job, dp=4, pp=4, gas=16, zero=1))
    drawn = sum(len(trace.x) for trace in figure.data if trace.name != "bubble")
    assert drawn <= 50
    assert "first" in figure.layout.title.text


def test_many_microbatches_are_drawn_without_the_repetitions(job: Job) -> None:
    plan = plan_of(job.changed(batch_tokens=4 * 64 * 4096), dp=4, pp=4, gas=64, zero=1)
    figure = plan_figures.schedule(plan)
    drawn = sum(len(trace.x) for trace in figure.data if trace.name != "bubble")
    assert drawn < 4 * 64 * 2 / 4
    (mark,) = figure.layout.annotations
    assert "more periods of 1 micro-batch" in mark.text
    step_s = simulated(plan.job, plan.layout).makespan_s
    assert float(figure.layout.xaxis.ticktext[-1].replace(",", "")) == pytest.approx(step_s * 1e3, rel=1e-2)
    assert figure.layout.xaxis.range[1] < step_s * 1e3 / 4


def test_sensitivity_marks_what_does_not_fit() -> None:
    job = Job(
        model=Model.load("llama-3-8b"),
        cluster=Cluster.load("8xh100"),
        seq=4096,
        batch_tokens=2**17,
        framework=Framework.load("playbook"),
    )
    figure = search_figures.sensitivity(plan_of(job, dp=8, zero=3, gas=4), most=40)
    hatched = [name for name, shape in zip(figure.data[0].y, figure.data[0].marker.pattern.shape, strict=True) if shape]
    assert any(name.startswith("zero=0") for name in hatched)
    assert not any(name.startswith("recompute=full") for name in hatched)


def test_the_pareto_front_has_no_dominated_layout(job: Job) -> None:
    front = survey.front(job)
    fastest = plan(job, top=1, explain=False).plans[0].estimate.step_time_s
    assert front[0][1].step_time_s == pytest.approx(fastest, rel=0.02)
    times, peaks = [found.step_time_s for _, found in front], [found.peak_gib for _, found in front]
    assert times == sorted(times)
    assert peaks == sorted(peaks, reverse=True)
    figure = search_figures.pareto(front, front[0][1])
    assert list(figure.data[0].y) == [found.headroom_gib for _, found in front]


def test_scaling_keeps_tokens_per_gpu_and_shows_the_node(job: Job) -> None:
    points = survey.scaling(job, 16)
    for point in points:
        if point.estimate is not None:
            tokens = point.estimate.tokens_per_s * point.estimate.step_time_s
            assert tokens == pytest.approx(point.gpus * survey.SEQUENCES_PER_GPU * job.seq)
    figure = search_figures.scaling(points, job.cluster, "scaling")
    assert [trace.name for trace in figure.data] == list(survey.TECHNIQUES)
    assert figure.layout.annotations[0].text == "node boundary"
    inside = {point.technique: point.estimate for point in points if point.gpus == 16}
    tensor, data = inside["tensor"], inside["data"]
    assert tensor is not None
    assert data is not None
    assert tensor.tokens_per_s < data.tokens_per_s  # across nodes tensor parallelism pays


def test_the_heat_map_marks_what_does_not_fit(job: Job) -> None:
    models = [Model.load("llama-3.2-1b"), Model.load("llama-3-405b")]
    cells = survey.heat_map(models, job.cluster, [1, 2], 4096, 2**18)
    figure = search_figures.heat_map(cells, "h100")
    text = figure.data[0].text
    assert text[1][0] == "does not fit"
    assert "tok/s/GPU" in text[0][0]
    assert figure.data[0].z[0][0] == pytest.approx(100 * cells[0].estimate.mfu_causal)  # type: ignore[union-attr]


def test_predicted_beside_measured(four_stages: Plan) -> None:
    side = compare.ComparisonSide("a", four_stages, four_stages.estimate)
    found = compare.compare(side, side)
    figure = plan_figures.predicted_and_measured(found)
    first = figure.data[0]
    assert first.x[list(first.y).index("step time")] == pytest.approx(1e3 * four_stages.estimate.step_time_s)


def test_losses_and_speed_of_runs() -> None:
    rows = [{"step": 1, "loss": 5.0, "tokens_per_s_per_gpu": 10.0}, {"step": 2, "loss": 4.0, "eval_loss": 4.5}]
    figure = run_figures.losses({"a": rows})
    assert [list(trace.y) for trace in figure.data] == [[5.0, 4.0], [4.5]]
    assert list(run_figures.throughput({"a": rows}).data[0].y) == [10.0]


def test_lanes_of_a_trace() -> None:
    intervals = StepIntervals(
        steps=[("ProfilerStep#3", (1000.0, 3000.0))],
        computing=[(500.0, 1500.0), (1500.5, 2000.0)],
        optimizer=[(1900.0, 2000.0)],
        communication=[CommInterval(1800.0, 2600.0, "zero", "all_gather"), CommInterval(2500.0, 2700.0, "zero", "all_gather")],
        collectives=[],
        transfers=[],
        actions=[],
    )
    figure = run_figures.lanes(intervals)
    found = {trace.name: [(base, base + long) for base, long in zip(trace.base, trace.x, strict=True)] for trace in figure.data}
    assert found["computing"] == [pytest.approx((0.0, 1.0))]  # cut at the step, and a gap of less than a pixel closed
    assert found["zero"] == [pytest.approx((0.8, 1.7))]


@pytest.mark.parametrize("theme", style.THEMES)
def test_themes_change_colours_only(theme: style.Theme, four_stages: Plan) -> None:
    figure = style.themed(plan_figures.memory_by_stage(four_stages), theme)
    assert figure.layout.paper_bgcolor == style.PAPER[theme]
    assert figure.layout.font.color == style.INK[theme]
    with pytest.raises(SpecError, match="light or dark"):
        style.layout_of("blue")  # type: ignore[arg-type]


@pytest.mark.parametrize("theme", style.THEMES)
def test_a_page_draws_the_themed_figure(theme: style.Theme, four_stages: Plan) -> None:
    figure = plan_figures.memory_by_stage(four_stages)
    before = figure.to_plotly_json()
    drawn = style.themed_json(figure, theme)
    assert figure.to_plotly_json() == before
    assert drawn == style.themed(figure, theme).to_plotly_json()


def test_every_colour_has_one_meaning() -> None:
    colours = [colour.lower() for colour in (*style.COLORS.values(), *style.SERIES)]
    assert len(set(colours)) == len(colours)


def test_without_a_pipeline_the_memory_bar_is_horizontal(job: Job) -> None:
    figure = plan_figures.memory_by_stage(plan_of(job, dp=16, gas=4, zero=1))
    assert {trace.orientation for trace in figure.data} == {"h"}
    assert figure.layout.shapes[0].x0 == pytest.approx(job.cluster.gpu.memory_gib)


def test_memory_stands_beneath_the_pipeline(four_stages: Plan) -> None:
    figure = plan_figures.pipeline(four_stages)
    beneath = [trace for trace in figure.data if trace.yaxis == "y2"]
    assert "activations" in {trace.name for trace in beneath}
    assert figure.layout.yaxis2.domain[1] < figure.layout.yaxis.domain[0]
    bars = [trace for trace in figure.data if trace.type == "bar" and trace.base is not None]
    end = max(base + long for trace in bars for base, long in zip(trace.base, trace.x, strict=True))
    assert max(beneath[0].x) <= end * 1.001


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0.4, 3.0, ["0.5 s", "1 s", "2 s"]),
        (150.0, 7_000.0, ["200 s", "500 s", "1k s", "2k s", "5k s"]),
        (6.39, 16.6, ["8 s", "10 s", "12 s", "14 s", "16 s"]),
        (2.1, 2.13, ["2.1 s", "2.12 s", "2.14 s"]),
        (1e-2, 1e5, ["0.01 s", "0.1 s", "1 s", "10 s", "100 s", "1k s", "10k s", "100k s"]),
    ],
)
def test_logarithmic_axes_have_round_ticks(low: float, high: float, texts: list[str]) -> None:
    axis = style.log_ticks(low, high, " s")
    assert axis["ticktext"] == texts
    assert axis["type"] == "log"
