"""The planner page: the job on the left, the best layouts on the right, and a layout to edit by hand."""

from __future__ import annotations

import asyncio
import io
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from nicegui import background_tasks, events, run, ui

from ultrascale.cost import cheatsheet
from ultrascale.cost.estimate import estimate
from ultrascale.cost.legality import problem
from ultrascale.export import targets
from ultrascale.export.common import File
from ultrascale.figures import plan as plan_figures
from ultrascale.figures import search as search_figures
from ultrascale.plan.candidates import OBJECTIVES
from ultrascale.plan.search import LayoutPreview, Result, explained
from ultrascale.plan.search import plan as search
from ultrascale.report.of_plan import headline, plan_page, verdict
from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.files import to_yaml
from ultrascale.specs.framework import Framework
from ultrascale.specs.gpu import GPU
from ultrascale.specs.job import Job, Precision
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.plan import HEADER, Plan
from ultrascale.specs.units import seconds
from ultrascale.studio.address import LONGEST, PlannerQuery, changes_text, pasted
from ultrascale.studio.frame import Chart, Frame, table
from ultrascale.studio.layout_editor import LayoutEditor

if TYPE_CHECKING:
    import plotly.graph_objects as go

SHOWN = 10  # layouts in the table
COLUMNS = {"layout": "layout", "step": "step", "rate": "tokens/s/GPU", "mfu": "MFU", "peak": "peak GiB"}
FIGURES: dict[str, Callable[[Plan], go.Figure | None]] = {
    "memory-by-stage": plan_figures.memory_by_stage,
    "time-by-cause": plan_figures.time_by_cause,
    "memory-over-step": plan_figures.memory_over_step,
    "schedule": lambda plan: plan_figures.schedule(plan) if plan.layout.pp > 1 else None,
    "sensitivity": lambda plan: search_figures.sensitivity(plan) if plan.rejected else None,
}
REST_S = 0.05  # wait until a moving control rests
SOON_S = 0.3  # show the closed-form ranking only if simulation takes longer
SENT_S = 0.03  # time to send the numbers to the browser


class SupersededError(Exception):
    """A newer request came while an older one was running."""


class Planner:
    def __init__(self, ask: PlannerQuery) -> None:
        self.frame = Frame("/", ask)
        self.requested = self.answered = 0
        self.result: Result | None = None
        self.plan: Plan | None = None
        with ui.row().classes("w-full no-wrap items-start gap-6"):
            with ui.column().classes("w-72 shrink-0 gap-2"):
                self.controls()
            with ui.column().classes("grow min-w-0 gap-3"):
                self.answers()

    async def load(self) -> None:
        await self.answer()

    # The job.

    def controls(self) -> None:
        ask = self.frame.ask
        ui.label("What is trained, on what").classes("text-base font-bold")
        self.choose("model", "Model", list(Model.presets()), ask.model)
        ui.button("Paste a model…", on_click=self.paste).props("outline dense no-caps")
        self.shape = ui.label("").classes("text-sm")
        self.choose("gpu", "GPU", list(GPU.presets()), ask.gpu)
        with ui.row().classes("w-full no-wrap"):
            self.write("nodes", "Nodes", ask.nodes)
            self.write("per_node", "GPUs a node", ask.per_node)
        self.write("batch", "Batch (tokens a step)", ask.batch)
        self.write("seq", "Sequence (tokens)", ask.seq)
        self.choose("precision", "Precision", list(get_args(Precision)), ask.precision)
        self.choose("objective", "Objective", list(OBJECTIVES), ask.objective)
        self.choose("framework", "Engine", list(Framework.presets()), ask.framework)
        self.write("fix", "Fix, such as tp=8,zero=1", ask.fix)
        self.write("forbid", "Forbid, such as cp", ask.forbid)

    def choose(self, name: str, label: str, options: list[str], value: str) -> None:
        known = value if value in options else options[0]
        select = ui.select(options, label=label, value=known, with_input=len(options) > 12).classes("w-full").mark(name)
        select.props(f'dense outlined aria-label="{label}"')
        select.on_value_change(lambda event: self.wanted(name, event))

    def write(self, name: str, label: str, value: str) -> None:
        field = ui.input(label, value=value).classes("w-full").mark(name)
        field.props(f'dense outlined maxlength=200 aria-label="{label}"')
        field.on_value_change(lambda event: self.wanted(name, event))

    async def wanted(self, name: str, event: events.ValueChangeEventArguments[Any]) -> None:
        values = {name: str(event.value or "").strip()}
        if name == "model":
            values["shape"] = ""
        if name not in ("fix", "forbid"):
            values["layout"] = ""
        self.frame.changed(**values)
        await self.answer()

    def paste(self) -> None:
        with ui.dialog() as dialog, ui.card().classes("w-[36rem]"):
            ui.label("A model file (YAML) or a Hugging Face config.json")
            text = (
                ui.textarea(value=self.frame.ask.shape).props(f"outlined maxlength={LONGEST}").classes("w-full").mark("shape")
            )
            problem_line = ui.label("").classes("text-negative")

            async def take() -> None:
                try:
                    pasted(text.value or "")
                except SpecError as error:
                    problem_line.text = str(error)
                    return
                dialog.close()
                self.frame.changed(shape=text.value or "", layout="")
                await self.answer()

            with ui.row():
                ui.button("Use it", on_click=take)
                ui.button("Cancel", on_click=dialog.close).props("flat")
        dialog.open()

    # The layouts.

    def answers(self) -> None:
        self.summary = ui.label("").classes("text-sm")
        self.tiles = ui.row().classes("gap-3")
        self.verdict = ui.label("").mark("verdict")
        self.layouts = ui.table(
            columns=[
                {"name": name, "label": label, "field": name, "align": "left" if name == "layout" else "right"}
                for name, label in COLUMNS.items()
            ],
            rows=[],
            row_key="number",
            selection="single",
            on_select=self.picked,
        ).classes("w-full")
        self.layouts.props("flat dense wrap-cells hide-pagination hide-selected-banner").props(
            ":rows-per-page-options=[0]"
        ).mark("layouts")
        with ui.row():
            ui.button("plan.yaml", on_click=self.save_plan).props("outline dense no-caps")
            ui.button("report.html", on_click=self.save_report).props("outline dense no-caps")
            with ui.dropdown_button("export", auto_close=True).props("outline dense no-caps"):
                for target in (*targets.ENGINES, *targets.LAUNCHERS):
                    ui.item(target, on_click=partial(self.save_export, target))
        with ui.expansion("Why this layout, and what was assumed", value=True).classes("w-full"):
            self.reasons = ui.column().classes("gap-1")
        with ui.expansion("Cut it by hand, and watch memory and time", value=True).classes("w-full"):
            self.by_hand = LayoutEditor(self.frame, self.cut)
        self.charts = {name: Chart(self.frame, name) for name in FIGURES}
        with ui.expansion("The cheat-sheet, with this plan's numbers", value=True).classes("w-full"):
            self.cheatsheet = ui.column().classes("w-full")

    async def answer(self) -> None:
        """Search again once the controls rest; a newer request cancels an older one.

        The numbers are sent first; controls of the layout, reasons and figures follow.
        """
        self.requested += 1
        mine = self.requested
        await asyncio.sleep(REST_S)
        if mine != self.requested:
            return
        with self.frame.show_errors():
            ask = self.frame.ask
            self.shape.text = f"pasted: {ask.the_model().name}" if ask.shape else ""
            job = ask.job()
            if ask.objective not in OBJECTIVES:
                raise SpecError(f"objective is '{ask.objective:.40}': {nearest(ask.objective, OBJECTIVES)}")
            options: dict[str, Any] = {"objective": ask.objective, "fix": _words(ask.fix), "forbid": _words(ask.forbid)}
            page = asyncio.get_running_loop()

            def preview(ranked: list[LayoutPreview]) -> None:  # called in the search's thread
                page.call_soon_threadsafe(page.call_later, SOON_S, self.show_preview, mine, job, ranked)

            def go_on(_: str) -> None:
                if mine != self.requested:
                    raise SupersededError

            try:
                found = await run.io_bound(search, job, top=SHOWN, explain=False, progress=go_on, preview=preview, **options)
            except SupersededError:
                return
            if mine != self.requested or found is None or self.frame.closed:
                return
            self.frame.say("")
            self.answered, self.result = mine, found
            self.show_result(found)
            if not found.plans:
                return
            shown = self.plan
            await asyncio.sleep(SENT_S)
            if mine != self.requested or self.frame.closed:
                return
            if self.plan is shown:  # else the user went on to another
                self.by_hand.begin(found.plans[0])
            plans = await run.io_bound(explained, found.plans, **options)
            if mine != self.requested or plans is None or self.frame.closed:
                return
            self.result = replace(found, plans=tuple(plans))
            if self.plan is found.plans[0]:
                self.show_plan(plans[0])

    def show_preview(self, mine: int, job: Job, ranked: list[LayoutPreview]) -> None:
        """The closed-form ranking, until the best layouts are simulated."""
        if mine != self.requested or mine == self.answered or self.frame.closed:
            return
        self.summary.text = "ranked by closed forms; the best are being simulated"
        self.layouts.selected = []
        self.layouts.rows = [
            _row(
                -number,
                one.layout,
                f"≈ {seconds(one.step_time_s)}",
                f"≈ {one.layout.batch_tokens(job.seq) / one.step_time_s / one.layout.gpus:,.0f}",
                "…",
                "…",
            )
            for number, one in enumerate(ranked, 1)
        ]

    def show_result(self, found: Result) -> None:
        self.summary.text = " · ".join(
            [f"{found.evaluated:,} legal layouts in {found.seconds:.2f} s, {found.fitting:,} fit", *found.notes]
        )
        rows = []
        for number, one in enumerate(found.plans):
            e = one.estimate
            cells = seconds(e.step_time_s), f"{e.tokens_per_s_per_gpu:,.0f}", f"{e.mfu:.1%}", f"{e.peak_gib:,.1f}"
            rows.append(_row(number, one.layout, *cells))
        self.layouts.rows = rows
        self.layouts.selected = rows[:1]
        if not found.plans:
            self.frame.say(str(found.no_fit))
            return
        best = found.plans[0]
        own = self.frame.ask.own_layout(best.job, best.layout) if self.frame.ask.layout else best.layout
        if own is None or own == best.layout:
            self.show_plan(best, reasons_pending=True)
        else:
            self.show_plan(self.planned(best, own))

    def picked(self, event: events.TableSelectionEventArguments) -> None:
        if self.result is not None and event.selection and event.selection[0]["number"] >= 0:
            selected = self.result.plans[event.selection[0]["number"]]
            best = dict(self.result.plans[0].layout)
            self.frame.changed(layout=changes_text({n: value for n, value in selected.layout if value != best[n]}))
            self.by_hand.begin(selected)
            self.show_plan(selected)

    def cut(self, layout: Layout, changes: str) -> str | None:
        """Show the edited layout, or why it is not legal."""
        assert self.result is not None
        job = self.result.plans[0].job
        sentence = problem(job, layout)
        if sentence is not None:
            return sentence
        self.frame.changed(layout=changes)
        self.show_plan(self.planned(self.result.plans[0], layout))
        return None

    @staticmethod
    def planned(best: Plan, layout: Layout) -> Plan:
        found = estimate(best.job, layout)
        faster = found.step_time_s / best.estimate.step_time_s - 1
        return Plan(
            job=best.job, layout=layout, estimate=found, reasons=(f"Cut by hand: a step takes {faster:+.1%} of the best's",)
        )

    def show_plan(self, plan: Plan, reasons_pending: bool = False) -> None:
        """The numbers at once, the figures after them; where its reasons follow, so do they."""
        self.plan = plan
        self.tiles.clear()
        with self.tiles:
            for name, value in headline(plan):
                with ui.card().classes("p-2 gap-0"):
                    ui.label(value).classes("text-lg font-bold").mark(f"tile {name.split(' of ')[0]}")
                    ui.label(name).classes("text-xs")
        self.verdict.text = f"{plan.layout}: {verdict(plan)}"
        first = (
            self.charts["memory-by-stage"].element is None
        )  # Plotly's script comes with the first figures, and with it all that moves
        if reasons_pending and not first:
            return
        self.reasons.clear()
        with self.reasons:
            for line in (*plan.reasons, *plan.estimate.notes):
                ui.label(f"• {line}")
        if first:
            self.draw(plan, _figures(plan))
        else:
            background_tasks.create(self.draw_soon(plan))

    async def draw_soon(self, plan: Plan) -> None:
        """The numbers are on the page before the figures are begun; of a control that moves only the last place is drawn."""
        await asyncio.sleep(SENT_S)
        if plan is not self.plan:
            return
        with self.frame.show_errors():
            figures = await run.io_bound(_figures, plan)
            if figures is not None and plan is self.plan and not self.frame.closed:
                self.draw(plan, figures)

    def draw(self, plan: Plan, figures: dict[str, go.Figure | None]) -> None:
        for name, figure in figures.items():
            self.charts[name].show(figure)
        self.cheatsheet.clear()
        with self.cheatsheet:
            formulas = [(one.name, one.form, one.value) for one in cheatsheet.formulas(plan)]
            table(("quantity", "formula", "here"), formulas, "formulas")
            table(cheatsheet.HEADINGS, [one.cells for one in cheatsheet.strategies(plan)], "techniques")

    # Downloads.

    def save_plan(self) -> None:
        if self.plan is not None:
            ui.download.content(HEADER + to_yaml(self.plan.to_mapping()), "plan.yaml")

    def save_export(self, to: str) -> None:
        """Another engine's files, or a launcher's, as one archive."""
        if self.plan is not None:
            with self.frame.show_errors():
                if to in targets.LAUNCHERS:
                    files, _ = targets.launcher_files(self.plan, to, None, to)
                else:
                    exported = targets.engine_files(self.plan, to, None, to)
                    if not exported.same:
                        engine, changed = exported.checks[0].engine, exported.checks[0].differences
                        fields = ", ".join(one.field for one in changed)
                        raise SpecError(f"{engine.title} would run another {fields}: plan for the engine {engine.framework}")
                    files = exported.files
                ui.download.content(_zipped(files), f"{to}.zip")

    async def save_report(self) -> None:
        if self.plan is not None:
            page = await run.io_bound(plan_page, self.plan, "plan.yaml")
            ui.download.content(page or "", "report.html")


def _figures(plan: Plan) -> dict[str, go.Figure | None]:
    return {name: draw(plan) for name, draw in FIGURES.items()}


def _row(number: int, layout: Layout, *cells: str) -> dict[str, Any]:
    return {"number": number, **dict(zip(COLUMNS, (str(layout), *cells), strict=True))}


def _zipped(files: Sequence[File]) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as bundle:
        for file in files:
            bundle.writestr(file.name, file.text)
    return archive.getvalue()


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.replace(" ", ",").split(",") if word.strip()]
