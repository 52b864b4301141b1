"""The heat map of a job: its own cell is its plan, its neighbours are of its kind, impossible cells have no plan."""

from __future__ import annotations

import pytest

from ultrascale import Cluster, Job, Model
from ultrascale.plan import plan
from ultrascale.plan.survey import heat_map_around
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


def test_a_neighbour_with_too_few_positions_has_no_plan() -> None:
    long = Model.load("gpt3-2.7b").model_copy(update={"name": "gpt-long", "max_positions": 8192})
    cells = heat_map_around(make_job("gpt3-2.7b", "8xh100").changed(model=long, seq=8192))
    assert {cell.model for cell in cells if cell.layout} == {"gpt-long"}
