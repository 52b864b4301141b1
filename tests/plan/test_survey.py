"""The heat map of a job: its own cell is its plan, its neighbours are of its kind, impossible cells have no plan."""

from __future__ import annotations

import pytest

from ultrascale import Cluster, Job, Model
from ultrascale.plan import plan
from ultrascale.plan.candidates import LayoutConstraints
from ultrascale.plan.search import best_plan
from ultrascale.plan.survey import front, heat_map_around, searched
from ultrascale.specs.framework import Framework


def make_job(model: str, cluster: str, **fields: object) -> Job:
    values = {"seq": 2048, "batch_tokens": 2**17, **fields}
    values.setdefault("framework", Framework.load("playbook"))
    return Job(model=Model.load(model), cluster=Cluster.load(cluster), **values)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_heat_map_of_a_job_contains_its_plan() -> None:
    job = make_job("llama-3.2-1b", "16xh100", precision="fp8", optimizer="sgd")
    messages: list[str] = []
    cells = heat_map_around(job, messages.append)
    assert sorted({cell.nodes for cell in cells}) == [1, 2, 4, 8]
    smaller, own, larger = dict.fromkeys(cell.model for cell in cells)
    sizes = [Model.load(name).parameters for name in (smaller, own, larger)]
    assert own == "llama-3.2-1b"
    assert 2 * sizes[0] <= sizes[1] <= sizes[2] / 2
    best = plan(job, top=1).plans[0]
    (here,) = [cell for cell in cells if (cell.model, cell.nodes) == (own, 2)]
    assert (here.layout, here.estimate) == (best.layout, best.estimate)
    assert len(messages) == len(cells) == 12


@pytest.mark.slow
def test_neighbours_are_of_the_jobs_kind() -> None:
    cells = heat_map_around(make_job("mixtral-8x7b", "8xh100"))
    assert all(Model.load(cell.model).moe for cell in cells)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "around"),
    [("qwen3-8b", ["qwen3-4b-2507", "qwen3-8b", "qwen3-32b"]), ("phi-4", ["phi-3-mini", "phi-4", "exaone-4.0-32b"])],
)
def test_neighbours_are_of_the_models_family_before_others(model: str, around: list[str]) -> None:
    assert list(dict.fromkeys(cell.model for cell in heat_map_around(make_job(model, "8xh100")))) == around


def test_a_neighbour_with_too_few_positions_has_no_plan() -> None:
    long = Model.load("gpt3-2.7b").model_copy(update={"name": "gpt-long", "max_positions": 8192})
    cells = heat_map_around(make_job("gpt3-2.7b", "8xh100").changed(model=long, seq=8192))
    assert {cell.model for cell in cells if cell.layout} == {"gpt-long"}


@pytest.mark.parametrize(("model", "cluster"), [("llama-3-8b", "32xh100"), ("mixtral-8x7b", "16xh100")])
def test_the_best_plan_is_the_first_of_all(model: str, cluster: str) -> None:
    job, none = make_job(model, cluster), LayoutConstraints()
    assert best_plan(job, none).layout == plan(job, top=1, explain=False).plans[0].layout  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["512xh100", "1024xh100"])
def test_the_usual_values_hold_the_best_layout_or_one_as_fast(cluster: str) -> None:
    job = make_job("llama-3-70b", cluster, seq=8192, batch_tokens=2**22)
    best, usual = (best_plan(job, one) for one in (LayoutConstraints(), searched(job.cluster.gpus)))
    assert best is not None
    assert usual is not None
    assert usual.estimate.step_time_s <= 1.02 * best.estimate.step_time_s


@pytest.mark.slow
def test_the_front_of_a_large_cluster_begins_with_its_plan() -> None:
    job = make_job("llama-3-8b", "512xh100", seq=8192, batch_tokens=2**22)
    found = front(job)
    assert found[0][1].step_time_s <= 1.02 * plan(job, top=1, explain=False).plans[0].estimate.step_time_s
    assert [one.step_time_s for _, one in found] == sorted(one.step_time_s for _, one in found)
