"""The accuracy page: predicted against measured speed of published runs, and the largest errors."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from nicegui import run, ui

from ultrascale.figures import runs as run_figures
from ultrascale.measure.accuracy.runs import MeasuredRun, read
from ultrascale.measure.accuracy.scores import ScoredRun, score
from ultrascale.studio.address import PlannerQuery
from ultrascale.studio.frame import Chart, Frame, table

WORST = 15
SPREAD = 16  # runs are predicted in this many passes over the file, so that the first few are from all of its sources
FIRST_PART, PART = 8, 24  # runs per prediction
DRAW_S = 0.6


class PublishedScores:
    """Predictions for the runs of one CSV, made once per server and in parts, so that a page shows the first at once."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.scored: list[ScoredRun] = []
        self.left: list[MeasuredRun] | None = None
        self.lock = asyncio.Lock()

    @property
    def total(self) -> int:
        return len(self.scored) + len(self.left or ())

    async def more(self) -> bool:
        """Predict some more runs; whether there are others left."""
        async with self.lock:
            if self.left is None:
                found = await run.io_bound(read, self.file) if self.file is not None else None
                runs = found[0] if found is not None else []
                self.left = [one for start in range(SPREAD) for one in runs[start::SPREAD]]
            count = PART if self.scored else FIRST_PART
            part = self.left[:count]
            if part:
                self.scored += await run.io_bound(score, part) or []
                self.left = self.left[count:]
            return bool(self.left)


class Accuracy:
    def __init__(self, ask: PlannerQuery, scores: PublishedScores) -> None:
        self.frame, self.scores = Frame("/accuracy", ask), scores
        with ui.element("section").classes("us-card"):
            ui.html("<h2>Predicted and measured speed of published runs</h2>", sanitize=False)
            self.state = ui.label("").mark("accuracy-state")
            self.group = ui.toggle(["gpu", "system", "source"], value="gpu", on_change=self.draw)
            self.group.props("no-caps dense unelevated").classes("q-mt-sm").mark("by")
        self.chart = Chart(self.frame, "scatter")
        self.chart.show(run_figures.accuracy([]))  # empty: the browser loads Plotly while the first runs are predicted
        self.worst = ui.element("section").classes("us-card us-scroll")
        self.worst.set_visibility(False)

    async def load(self) -> None:
        with self.frame.show_errors():
            if self.scores.file is None:
                self.state.text = "No CSV of measured runs was given: start the studio with --accuracy data/published.csv."
                return
            self.state.text = f"predicting the runs of {self.scores.file.name} …"
            drawn_s, more = 0.0, True
            while more and not self.frame.closed:
                more = await self.scores.more()
                if not self.frame.closed and (not more or time.monotonic() - drawn_s > DRAW_S):
                    self.draw()
                    drawn_s = time.monotonic()
                    await asyncio.sleep(0.1)  # send it before the next part occupies the interpreter

    def draw(self) -> None:
        scored = self.scores.scored
        errors = [one.error for one in scored if one.error is not None]
        if not errors:
            return
        unread = sum(one.reason is not None for one in scored)
        mean, middle = sum(errors) / len(errors), sorted(errors)[len(errors) // 2]
        waiting = f"; {len(scored)} of {self.scores.total} rows so far …" if self.scores.left else ""
        self.state.text = (
            f"{len(errors)} runs: tokens/s {mean:.1%} off in the mean, {middle:.1%} in the median; "
            f"{unread} not modelled{waiting}"
        )
        self.chart.show(run_figures.accuracy(scored, self.group.value))
        self.worst.clear()
        self.worst.set_visibility(True)
        worst = sorted((one for one in scored if one.error is not None), key=lambda one: -(one.error or 0))[:WORST]
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
