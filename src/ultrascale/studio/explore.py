"""The page of other layouts: Pareto front, scaling of each technique, map of best layouts."""

from __future__ import annotations

from nicegui import run, ui

from ultrascale.figures import search as search_figures
from ultrascale.plan import survey
from ultrascale.specs.errors import SpecError
from ultrascale.specs.model import Model
from ultrascale.specs.units import tokens
from ultrascale.studio.address import PlannerQuery
from ultrascale.studio.frame import Chart, Frame

MODELS = ("llama-3.2-1b", "llama-3.2-3b", "llama-3-8b", "llama-3-70b")
NODES = (1, 2, 4, 8, 16, 32)
MOST_CELLS = 60


class Explore:
    def __init__(self, ask: PlannerQuery) -> None:
        self.frame = Frame("/explore", ask)
        self.state = ui.label("").classes("us-soft").mark("explore-state")
        with ui.element("div").classes("us-figures"):
            self.front, self.scaling = Chart(self.frame, "front"), Chart(self.frame, "scaling")
        with ui.element("section").classes("us-card"), ui.row().classes("full-width items-center"):
            ui.html("<h2>The best layout of each model on each number of nodes</h2>", sanitize=False).classes("full-width")
            self.models = ui.select(list(Model.presets()), label="models", value=list(MODELS), multiple=True)
            self.models.classes("us-chips").props('use-chips outlined dense aria-label="models"').mark("map-models")
            self.nodes = ui.select(list(NODES), label="nodes", value=list(NODES[:4]), multiple=True)
            self.nodes.classes("us-chips").props('use-chips outlined dense aria-label="nodes"').mark("map-nodes")
            self.button = ui.button("Draw the map", on_click=self.draw_map).props("no-caps unelevated").mark("map")
        self.map = Chart(self.frame, "heat-map")

    async def load(self) -> None:
        with self.frame.show_errors():
            ask = self.frame.ask
            job = ask.job()
            self.state.text = f"{job.model.name} on {job.cluster.label}, as asked on the planner's page …"
            front = await run.io_bound(survey.front, job)
            if front and not self.frame.closed:
                self.front.show(search_figures.pareto(front))
            points = await run.io_bound(survey.scaling, job, max(16, min(1024, job.cluster.gpus)))
            if points and not self.frame.closed:
                title = f"Each technique alone, {survey.SEQUENCES_PER_GPU} sequences of {job.seq:,} tokens per GPU"
                self.scaling.show(search_figures.scaling(points, job.cluster, title))
            if not self.frame.closed:
                self.state.text = f"{job.model.name} on {job.cluster.label}, as asked on the planner's page"

    async def draw_map(self) -> None:
        with self.frame.show_errors():
            self.frame.say("")
            names, nodes = list(self.models.value), sorted(self.nodes.value)
            if not names or not nodes:
                raise SpecError("the map needs a model and a number of nodes: choose some above")
            if len(names) * len(nodes) > MOST_CELLS:
                raise SpecError(
                    f"the map would have {len(names) * len(nodes)} cells but at most {MOST_CELLS} are drawn: choose fewer"
                )
            presets, ask = Model.presets(), self.frame.ask
            models = sorted((presets[name] for name in names if name in presets), key=lambda model: model.parameters)
            self.button.props("loading")
            try:
                cells = await run.io_bound(
                    survey.heat_map,
                    models,
                    ask.the_cluster(),
                    nodes,
                    tokens(ask.seq, "seq", "8192 or 8k"),
                    tokens(ask.batch, "batch"),
                )
            finally:
                if not self.frame.closed:
                    self.button.props(remove="loading")
            if cells and not self.frame.closed:
                self.map.show(search_figures.heat_map(cells, ask.gpu))
