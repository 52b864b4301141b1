"""The runs page: live metrics of the runs in one folder, and comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from nicegui import ui

from ultrascale.figures import plan as plan_figures
from ultrascale.figures import runs as run_figures
from ultrascale.measure import compare
from ultrascale.report.of_run import last_loss, metrics
from ultrascale.show.compare import rows as compared
from ultrascale.specs.errors import RunError, SpecError
from ultrascale.specs.folders import MEASUREMENT, METRICS, run_folders
from ultrascale.studio.address import PlannerQuery
from ultrascale.studio.frame import Chart, Frame, table

MOST = 200  # runs in the list, newest first
EVERY_S = 2.0


def names(folder: Path) -> list[str]:
    """Runs of the folder, newest first; a link that leads out of it is none."""
    inside = folder.resolve()
    found = [run for run in run_folders(folder) if run.resolve().parent == inside]
    found.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    return [path.name for path in found[:MOST]]


class Runs:
    def __init__(self, ask: PlannerQuery, query: Mapping[str, str], folder: Path) -> None:
        self.frame, self.folder = Frame("/runs", ask), folder
        known = names(folder)
        selected = [name for name in query.get("run", "").split("|") if name in known] or known[:1]
        with ui.element("section").classes("us-card"):
            ui.html(f"<h2>Runs in {escape(str(folder))}</h2>", sanitize=False)
            self.select = ui.select(known, label="runs", value=selected, multiple=True, on_change=self.picked)
            self.select.classes("full-width").props('use-chips outlined dense aria-label="runs"').mark("runs")
            self.state = ui.label("").classes("q-mt-sm").mark("run-state")
        with ui.element("div").classes("us-figures"):
            self.loss, self.speed = Chart(self.frame, "loss"), Chart(self.frame, "speed")
            self.beside = Chart(self.frame, "beside", wide=True)
        self.terms = ui.element("section").classes("us-figure us-scroll")
        self.drawn: dict[str, float] = {}
        self.refresh()
        ui.timer(EVERY_S, self.refresh)

    def picked(self, event: Any) -> None:
        self.drawn = {}
        words = urlencode({"run": "|".join(event.value), **({"theme": "dark"} if self.frame.theme == "dark" else {})})
        ui.navigate.history.replace(f"/runs?{words}")
        self.refresh()

    def refresh(self) -> None:
        """Read anew what has changed on the disk."""
        known = names(self.folder)
        if known != list(self.select.options):
            self.select.set_options(known, value=[name for name in self.select.value if name in known])
        selected = [name for name in self.select.value if name in known]
        if not known:
            self.state.text = "There is no run here yet: `ultrascale train --out` writes one."
            return
        stamps = {name: _stamp(self.folder / name) for name in selected}
        if stamps == self.drawn and self.drawn:
            return
        self.drawn = stamps
        self.frame.say("")
        with self.frame.show_errors():
            self.draw(selected)

    def draw(self, selected: list[str]) -> None:
        rows = {name: metrics(self.folder / name / METRICS) for name in selected}
        steps = [
            f"{name}: {len(found):,} steps" + (f", loss {last_loss(found)}" if found else "") for name, found in rows.items()
        ]
        self.state.text = " · ".join(steps) or "Choose a run."
        some = any(rows.values())
        self.loss.show(run_figures.losses(rows) if some else None)
        self.speed.show(run_figures.throughput(rows) if some else None)
        self.terms.clear()
        found = self.compared(selected)
        self.beside.show(plan_figures.predicted_and_measured(found) if found is not None else None)
        if found is not None:
            sides = found.first, found.second
            heads = ("term", *(f"{side.name} ({side.word})" for side in sides), "difference")
            lines = compared(found.terms, (found.first.word, found.second.word))
            with self.terms:
                for sentence in found.sentences:
                    ui.label(sentence)
                table(heads, lines, "terms")

    def compared(self, selected: list[str]) -> compare.Comparison | None:
        """One run beside its plan, or two beside each other, once they have been measured."""
        done = [name for name in selected if (self.folder / name / MEASUREMENT).is_file()]
        if len(selected) not in (1, 2) or len(done) != len(selected):
            return None
        try:
            sides = [compare.load(self.folder / name) for name in selected]
            sides = [compare.ComparisonSide(name, side.plan, side.result) for name, side in zip(selected, sides, strict=True)]
            if len(sides) == 1:
                sides = [compare.ComparisonSide("its plan", sides[0].plan, sides[0].plan.estimate), sides[0]]
            return compare.compare(sides[0], sides[1])
        except (SpecError, RunError) as error:
            self.frame.say(str(error))
            return None


def _stamp(run: Path) -> float:
    return max((file.stat().st_mtime for file in run.iterdir() if file.is_file()), default=0.0)
