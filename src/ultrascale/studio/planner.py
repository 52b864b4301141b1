"""The planner page: the job and a manual layout on the left; layouts, figures and reasons on the right."""

from __future__ import annotations

import asyncio
import io
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

from nicegui import background_tasks, run, ui

from ultrascale.cost import cheatsheet
from ultrascale.cost.engines import problem
from ultrascale.cost.estimate import estimate
from ultrascale.export import targets
from ultrascale.export.common import File
from ultrascale.figures import plan as plan_figures
from ultrascale.figures import search as search_figures
from ultrascale.plan.candidates import OBJECTIVES
from ultrascale.plan.search import LayoutPreview, Result, explained
from ultrascale.plan.search import plan as search
from ultrascale.report.of_plan import plan_page, verdict
from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.files import to_yaml
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.plan import HEADER, Plan
from ultrascale.studio.address import PlannerQuery, changes_text, words
from ultrascale.studio.answer import cards, error_fixes, no_fit_fixes, no_fit_words
from ultrascale.studio.cluster_map import ClusterMap
from ultrascale.studio.frame import Chart, Frame, table
from ultrascale.studio.job_form import JobForm
from ultrascale.studio.layout_editor import LayoutEditor
from ultrascale.studio.layout_table import MANUAL, LayoutTable, layout_words, plan_row, preview_rows

if TYPE_CHECKING:
    import plotly.graph_objects as go

SHOWN = 10  # layouts in the table
FIGURES: dict[str, Callable[[Plan], go.Figure | None]] = {
    "memory-by-stage": plan_figures.memory_by_stage,
    "time-by-cause": plan_figures.time_by_cause,
    "pipeline": lambda plan: (plan_figures.pipeline if plan.layout.pp > 1 else plan_figures.memory_over_step)(plan),
    "sensitivity": lambda plan: search_figures.sensitivity(plan) if plan.rejected else None,
}
REST_S = 0.05  # wait until a moving control rests
SENT_S = 0.03  # time to send the numbers to the browser


class SupersededError(Exception):
    """A newer request came while an older one was running, or the browser left the page."""


class Planner:
    def __init__(self, ask: PlannerQuery) -> None:
        self.frame = Frame("/", ask)
        self.requested = self.answered = 0
        self.result: Result | None = None
        self.plan: Plan | None = None
        self.manual: Plan | None = None
        with ui.element("div").classes("us-plan"):
            with ui.element("aside").classes("us-panel"):
                self.form = JobForm(ask, self.wanted)
                self.editor = LayoutEditor(self.frame, self.edited)
            with ui.element("main").classes("us-answers"):
                self.answers()

    async def load(self) -> None:
        await self.answer()

    def answers(self) -> None:
        self.cards = ui.element("div").classes("us-cards").props('aria-label="the selected layout" role="group"')
        self.cards.set_visibility(False)
        self.empty = ui.element("section").classes("us-card").mark("empty")
        with ui.element("section").classes("us-card"):
            self.summary = ui.label("Searching every legal layout …").classes("us-soft").mark("summary")
            self.layouts = LayoutTable(self.picked)
            self.verdict = ui.label("").classes("q-mt-sm").mark("verdict")
            self.convention = ui.label("").classes("us-soft")
            with ui.row().classes("q-mt-sm us-buttons") as self.downloads:
                ui.button("plan.yaml", on_click=self.save_plan).props("outline dense no-caps")
                ui.button("report.html", on_click=self.save_report).props("outline dense no-caps")
                with ui.dropdown_button("export", auto_close=True).props("outline dense no-caps"):
                    for target in (*targets.ENGINES, *targets.LAUNCHERS):
                        ui.item(target, on_click=partial(self.save_export, target))
        self.downloads.set_visibility(False)
        with ui.element("div").classes("us-figures"):
            self.charts = {name: Chart(self.frame, name, wide=name == "pipeline") for name in list(FIGURES)[:3]}
            self.cluster = ClusterMap()
        with ui.element("section").classes("us-card") as self.why:
            ui.html("<h2>Why this layout, and what was assumed</h2>", sanitize=False)
            self.reasons = ui.element("ul").classes("us-reasons").mark("reasons")
        self.charts["sensitivity"] = Chart(self.frame, "sensitivity")
        with ui.expansion("Cheat-sheet with this plan's numbers").classes("us-card") as self.more:
            self.cheatsheet = ui.column().classes("us-scroll")
        self.show_sections(False)

    def show_sections(self, shown: bool) -> None:
        for one in (self.cards, self.downloads, self.why, self.more):
            one.set_visibility(shown)
        self.empty.set_visibility(False)

    # The search.

    async def wanted(self, values: dict[str, str]) -> None:
        """A control of the job has changed."""
        keep = set(values) <= {"fix", "forbid"}
        self.frame.changed(**values, **({} if keep else {"layout": ""}))
        await self.answer()

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
            try:
                await self.search(mine)
            except SpecError as error:
                if mine == self.requested:
                    self.summary.text = "No layout was evaluated."
                    self.show_empty("There is no such layout", str(error), error_fixes(self.frame.ask))

    async def search(self, mine: int) -> None:
        ask = self.frame.ask
        errors = ask.field_errors()
        self.form.mark(errors)
        if errors:
            self.frame.say("\n".join(errors.values()))
            if self.result is None:
                self.summary.text = "Correct the marked fields to see layouts."
            return
        self.frame.say("")
        self.form.shape.text = f"pasted: {ask.the_model().name}" if ask.shape else ""
        job = ask.job()
        if ask.objective not in OBJECTIVES:
            raise SpecError(f"objective is '{ask.objective:.40}': {nearest(ask.objective, OBJECTIVES)}")
        options: dict[str, Any] = {"objective": ask.objective, "fix": words(ask.fix), "forbid": words(ask.forbid)}
        page = asyncio.get_running_loop()

        def preview(ranked: list[LayoutPreview]) -> None:  # called in the search's thread
            page.call_soon_threadsafe(self.show_preview, mine, job, ranked)

        def go_on(sentence: str) -> None:
            if mine != self.requested or self.frame.closed:
                raise SupersededError
            page.call_soon_threadsafe(self.show_progress, mine, sentence)

        try:
            found = await run.io_bound(search, job, top=SHOWN, explain=False, progress=go_on, preview=preview, **options)
        except SupersededError:
            return
        if mine != self.requested or found is None or self.frame.closed:
            return
        self.answered, self.result = mine, found
        self.show_result(found)
        if not found.plans:
            return
        shown = self.plan
        await asyncio.sleep(SENT_S)
        if mine != self.requested or self.frame.closed:
            return
        if self.plan is shown and shown is not None:  # else the user went on to another
            self.editor.begin(shown)
        plans = await run.io_bound(explained, found.plans, **options)
        if mine != self.requested or plans is None or self.frame.closed:
            return
        self.result = replace(found, plans=tuple(plans))
        if self.plan is found.plans[0]:
            self.show_plan(plans[0])

    def show_progress(self, mine: int, sentence: str) -> None:
        if mine == self.requested and mine != self.answered and not self.frame.closed:
            self.summary.text = f"{sentence[0].upper()}{sentence[1:]} …"

    def show_preview(self, mine: int, job: Job, ranked: list[LayoutPreview]) -> None:
        """The closed-form ranking, until the best layouts are simulated."""
        if mine == self.requested and mine != self.answered and not self.frame.closed:
            self.summary.text = "Ranked by closed forms; the best are being simulated …"
            self.layouts.show(preview_rows(job, ranked))

    def show_result(self, found: Result) -> None:
        self.summary.text = " · ".join([f"{found.evaluated:,} legal layouts searched in {found.seconds:.2f} s", *found.notes])
        self.manual = None
        if found.no_fit is not None:
            self.show_empty("Nothing fits", no_fit_words(found.no_fit), no_fit_fixes(found, self.frame.ask))
            return
        self.show_sections(True)
        best = found.plans[0]
        own = self.frame.ask.own_layout(best.job, best.layout) if self.frame.ask.layout else best.layout
        listed = [number for number, one in enumerate(found.plans) if one.layout == own]
        if own is None or problem(best.job, own) is not None:
            self.frame.say(f"layout={self.frame.ask.layout:.100} is not legal for this job: the best layout is shown")
            listed = [0]
        if listed:
            self.show_plan(found.plans[listed[0]], reasons_pending=listed[0] == 0)
            self.show_rows(listed[0])
        elif own is not None:
            self.show_manual(own)

    def show_rows(self, selected: int) -> None:
        assert self.result is not None
        best = self.result.plans[0]
        several = len({one.layout.gpus for one in self.result.plans}) > 1
        rows = [plan_row(number, one, best, several) for number, one in enumerate(self.result.plans)]
        if self.manual is not None:
            rows.insert(0, plan_row(MANUAL, self.manual, best, several))
        self.layouts.show(rows, selected)

    def show_empty(self, title: str, text: str, fixes: Sequence[tuple[str, dict[str, str]]]) -> None:
        """No layout to show: say why, with buttons that change the job so that there is one."""
        self.frame.say("")
        self.plan = self.result = self.manual = None
        self.show_sections(False)
        self.layouts.show([])
        self.verdict.text = self.convention.text = ""
        self.editor.clear()
        self.draw(None, dict.fromkeys(FIGURES))
        self.empty.clear()
        self.empty.set_visibility(True)
        with self.empty:
            ui.html(f"<h2>{escape(title)}</h2>", sanitize=False)
            ui.label(text).classes("q-my-sm")
            with ui.column().classes("us-buttons"):
                for label, values in fixes:
                    ui.button(label, on_click=partial(self.fix, values)).props("outline no-caps align=left").classes(
                        "text-left"
                    )

    async def fix(self, values: dict[str, str]) -> None:
        self.form.fill(self.frame.ask.changed(**values))
        await self.wanted(values)

    # The selected layout.

    def picked(self, number: int) -> None:
        """A row of the table was selected."""
        with self.frame.show_errors():
            if self.result is None or number < MANUAL:
                return
            selected = self.manual if number == MANUAL else self.result.plans[number]
            if selected is None or selected is self.plan:
                return
            self.remember(selected.layout)
            self.editor.begin(selected)
            self.show_plan(selected)

    def edited(self, layout: Layout) -> str | None:
        """Show the edited layout as a selected row, or say why it is not legal."""
        assert self.result is not None
        sentence = problem(self.result.plans[0].job, layout)
        if sentence is not None:
            return sentence
        self.remember(layout)
        self.show_manual(layout)
        return None

    def show_manual(self, layout: Layout) -> None:
        assert self.result is not None
        best = self.result.plans[0]
        found = estimate(best.job, layout)
        slower = found.step_time_s / best.estimate.step_time_s - 1
        reason = f"Manual layout: its step time differs by {slower:+.1%} from the best layout's"
        self.manual = Plan(job=best.job, layout=layout, estimate=found, reasons=(reason,))
        self.show_plan(self.manual)
        self.show_rows(MANUAL)

    def remember(self, layout: Layout) -> None:
        """Keep in the address how the layout differs from the best; dp and gas only where they do not follow."""
        assert self.result is not None
        best = self.result.plans[0]
        other = {name: value for name, value in layout if value != getattr(best.layout, name)}
        short = {name: value for name, value in other.items() if name not in ("dp", "gas")}
        derived = self.frame.ask.changed(layout=changes_text(short)).own_layout(best.job, best.layout)
        self.frame.changed(layout=changes_text(short if derived == layout else other))

    def show_plan(self, plan: Plan, reasons_pending: bool = False) -> None:
        """The numbers at once, the figures after them; where its reasons follow, so do they."""
        assert self.result is not None
        self.plan = plan
        cards(self.cards, plan, self.result.plans[0])
        self.verdict.text = f"{layout_words(plan.layout)}: {verdict(plan)}"
        peak = "fp8" if plan.job.precision.startswith("fp8") else plan.job.precision
        self.convention.text = f"MFU: model FLOPs with causal attention over the GPU's {peak} peak."
        first = self.charts["memory-by-stage"].element is None  # Plotly's script comes with the first figures
        if reasons_pending and not first:
            return
        self.reasons.clear()
        with self.reasons:
            for line in (*plan.reasons, *plan.estimate.notes):
                ui.html(escape(line), tag="li", sanitize=False)
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

    def draw(self, plan: Plan | None, figures: dict[str, go.Figure | None]) -> None:
        for name, figure in figures.items():
            self.charts[name].show(figure)
        self.cluster.show(plan)
        self.cheatsheet.clear()
        if plan is None:
            return
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
                        raise SpecError(exported.checks[0].refusal())
                    files = exported.files
                ui.download.content(_zipped(files), f"{to}.zip")

    async def save_report(self) -> None:
        if self.plan is not None:
            with self.frame.show_errors():
                page = await run.io_bound(plan_page, self.plan, "plan.yaml")
                ui.download.content(page or "", "report.html")


def _figures(plan: Plan) -> dict[str, go.Figure | None]:
    return {name: draw(plan) for name, draw in FIGURES.items()}


def _zipped(files: Sequence[File]) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as bundle:
        for file in files:
            bundle.writestr(file.name, file.text)
    return archive.getvalue()
