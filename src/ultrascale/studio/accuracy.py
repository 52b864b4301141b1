"""The accuracy page: predicted against measured speed of published runs, and the largest errors."""

from __future__ import annotations

import asyncio
from multiprocessing import get_context
from pathlib import Path

from nicegui import run, ui

from ultrascale.figures import runs as run_figures
from ultrascale.measure.accuracy.scores import ScoredRun, first_scores, send_scores
from ultrascale.studio.address import PlannerQuery
from ultrascale.studio.frame import Chart, Frame, table

WORST = 15
FIRST_DRAW_S, REDRAW_S = 0.05, 0.5  # until the first drawing, and between two drawings of predictions that come in


class PublishedScores:
    """Predictions for the runs of one CSV: made once per server, from its start on, all but the first in another process.

    A prediction of 417 runs takes 6 s of one core: in the server's own process it would slow every page meanwhile.
    """

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.scored: list[ScoredRun] = []
        self.total = 0
        self.task: asyncio.Task[None] | None = None

    @property
    def done(self) -> bool:
        return self.file is None or (self.task is not None and self.task.done())

    def start(self) -> None:
        """Begin to predict; called in the server's event loop."""
        self.task = asyncio.create_task(self._predict())

    def check(self) -> None:
        """Raise what ended the predictions early."""
        if self.task is not None and self.task.done() and not self.task.cancelled():
            self.task.result()

    async def _predict(self) -> None:
        if self.file is None:
            return
        context = get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        context.Process(target=send_scores, args=(self.file, sender), daemon=True).start()
        sender.close()
        first = await run.io_bound(first_scores, self.file)  # while that process imports what this one already has
        if first is None:  # the server is stopping
            return
        self.total, self.scored = first
        while len(self.scored) < self.total:
            part = await run.io_bound(receiver.recv)
            if part is None:
                return
            if isinstance(part, Exception):
                raise part
            self.scored += part


class Accuracy:
    def __init__(self, ask: PlannerQuery, scores: PublishedScores) -> None:
        self.frame, self.scores = Frame("/accuracy", ask), scores
        with ui.element("section").classes("us-card"):
            ui.html("<h2>Predicted and measured speed of published runs</h2>", sanitize=False)
            self.state = ui.label("").mark("accuracy-state")
            self.group = ui.toggle(["gpu", "system", "source"], value="gpu", on_change=self.draw)
            self.group.props("no-caps dense unelevated").classes("q-mt-sm").mark("by")
        self.chart = Chart(self.frame, "scatter")
        self.worst = ui.element("section").classes("us-card us-scroll")
        self.worst.set_visibility(False)
        if scores.file is None:
            self.state.text = "No CSV of measured runs was given: start the studio with --accuracy data/published.csv."
        elif not scores.scored:
            self.state.text = f"predicting the runs of {scores.file.name} …"
        self.chart.show(run_figures.accuracy([]))  # empty: the browser loads Plotly while the first runs are predicted
        self.draw()

    async def load(self) -> None:
        """Follow the predictions until all are on the page."""
        drawn = len(self.scores.scored)
        while not self.scores.done and not self.frame.closed:
            await asyncio.sleep(REDRAW_S if drawn else FIRST_DRAW_S)
            if len(self.scores.scored) > drawn and not self.scores.done and not self.frame.closed:
                drawn = len(self.scores.scored)
                self.draw()
        if not self.frame.closed:
            self.scores.check()
            if drawn < self.scores.total:
                self.draw()

    def draw(self) -> None:
        scored = self.scores.scored
        errors = [one.error for one in scored if one.error is not None]
        if not errors:
            return
        unread = sum(one.reason is not None for one in scored)
        mean, middle = sum(errors) / len(errors), sorted(errors)[len(errors) // 2]
        waiting = f"; {len(scored)} of {self.scores.total} rows so far …" if len(scored) < self.scores.total else ""
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
                    one.run.gpu,
                    f"{one.measured or 0:,.0f}",
                    f"{one.tokens_per_s_per_gpu or 0:,.0f}",
                    f"{(one.ratio or 1) - 1:+.1%}",
                    one.run.source,
                )
                for one in worst
            ]
            table(("worst runs", "GPU", "measured tokens/s/GPU", "predicted", "difference", "source"), lines, "worst")
