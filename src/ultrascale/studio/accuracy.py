"""The accuracy page: predicted against measured speed of published runs, and the largest errors."""

from __future__ import annotations

from pathlib import Path

from nicegui import run, ui

from ultrascale.figures import runs as run_figures
from ultrascale.measure.accuracy.runs import read
from ultrascale.measure.accuracy.scores import ScoredRun, score
from ultrascale.studio.address import PlannerQuery
from ultrascale.studio.frame import Chart, Frame, table

WORST = 15


class Accuracy:
    def __init__(self, ask: PlannerQuery, file: Path | None) -> None:
        self.frame, self.file = Frame("/accuracy", ask), file
        self.scored: list[ScoredRun] = []
        self.state = ui.label("").mark("accuracy-state")
        self.group = ui.toggle(["gpu", "system", "source"], value="gpu", on_change=self.draw).props("no-caps").mark("by")
        self.chart = Chart(self.frame, "scatter")
        self.worst = ui.column().classes("w-full")

    async def load(self) -> None:
        if self.file is None:
            self.state.text = "No CSV of measured runs was given: start the studio with --accuracy data/published.csv."
            return
        self.state.text = f"predicting the runs of {self.file.name} …"
        with self.frame.show_errors():
            self.scored = await run.io_bound(lambda file: score(read(file)[0]), self.file) or []
            if not self.frame.closed:
                self.draw()

    def draw(self) -> None:
        errors = [one.error for one in self.scored if one.error is not None]
        if not errors:
            return
        unread = sum(one.reason is not None for one in self.scored)
        mean, middle = sum(errors) / len(errors), sorted(errors)[len(errors) // 2]
        self.state.text = (
            f"{len(errors)} runs: tokens/s {mean:.1%} off in the mean, {middle:.1%} in the median; {unread} not modelled"
        )
        self.chart.show(run_figures.accuracy(self.scored, self.group.value))
        self.worst.clear()
        worst = sorted((one for one in self.scored if one.error is not None), key=lambda one: -(one.error or 0))[:WORST]
        with self.worst:
            lines = [
                (
                    one.run.id,
                    one.run.source[:60],
                    one.run.gpu,
                    f"{one.measured or 0:,.0f}",
                    f"{one.tokens_per_s_per_gpu or 0:,.0f}",
                    f"{(one.ratio or 1) - 1:+.1%}",
                )
                for one in worst
            ]
            table(("worst runs", "source", "GPU", "measured tokens/s/GPU", "predicted", "difference"), lines, "worst")
