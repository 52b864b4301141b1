"""The schedules page: pipeline schedules side by side with sliders for ranks, micro-batches and times, animated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from nicegui import ui

from ultrascale.figures import style
from ultrascale.figures.plan import gantt
from ultrascale.schedules import REGISTRY, StageTimes, Timeline, build, in_flight, legal, simulate
from ultrascale.specs.errors import SpecError
from ultrascale.studio.address import PlannerQuery
from ultrascale.studio.frame import Chart, Frame

PLAYED_S, TICK_S = 6.0, 0.1
COMPARED = [spec.name for spec in REGISTRY.values() if not spec.holds_all][:4]  # at first
HEADS = {
    "schedule": "schedule",
    "chunks": "virtual stages",
    "bubble": "bubble",
    "takes": "step (forwards)",
    "delta": "Δ best",
    "memory": "activations, micro-batches",
    "what": "",
}


@dataclass(frozen=True)
class Slider:
    key: str
    label: str
    low: float
    high: float
    step: float
    usual: float

    def words(self, value: float) -> str:
        return f"{self.label}: {value:g}"

    def read(self, text: str | None) -> float:
        """From an address, where anything may stand."""
        try:
            value = float(text[:12]) if text else self.usual
        except ValueError:
            return self.usual
        if not self.low <= value <= self.high:
            return self.usual
        return round(value / self.step) * self.step


SLIDERS = (
    Slider("ranks", "pipeline ranks", 1, 16, 1, 4),
    Slider("microbatches", "micro-batches", 1, 64, 1, 8),
    Slider("chunks", "virtual stages", 1, 8, 1, 2),
    Slider("backward", "backward/forward time ratio", 1, 4, 0.1, 2),
    Slider("send", "send/forward time ratio", 0, 0.5, 0.01, 0),
)


class Schedules:
    def __init__(self, ask: PlannerQuery, query: Mapping[str, str]) -> None:
        self.frame = Frame("/schedules", ask)
        asked = [name for name in query.get("schedule", "")[:200].split("|") if name in REGISTRY]
        self.names = asked or [*COMPARED]
        self.values = {knob.key: knob.read(query.get(knob.key)) for knob in SLIDERS}
        with ui.element("div").classes("us-plan"):
            with ui.element("aside").classes("us-panel"), ui.element("section").classes("us-card"):
                ui.html("<h2>Pipeline</h2>", sanitize=False)
                for knob in SLIDERS:
                    self.slider(knob)
                ui.button("Play", on_click=self.play).props("outline no-caps dense").classes("q-mt-sm full-width").mark("play")
            with ui.element("main").classes("us-answers"):
                with ui.element("section").classes("us-card"):
                    self.grid = ui.table(columns=_columns(), rows=[], row_key="schedule", selection="multiple")
                    self.grid.classes("full-width us-layouts us-schedules").props(
                        "flat dense hide-pagination hide-selected-banner"
                    )
                    self.grid.props(":rows-per-page-options=[0]").on_select(self.chosen)
                    ui.label("Select the schedules to draw; all have the same time axis.").classes("us-soft q-mt-sm")
                with ui.element("div").classes("us-figures"):
                    self.charts = {name: Chart(self.frame, f"gantt-{name}") for name in REGISTRY}
        self.timelines: dict[str, Timeline] = {}
        self.clock = ui.timer(TICK_S, self.tick, active=False)
        self.played_s = 0.0
        with self.frame.show_errors():
            self.show()

    def slider(self, knob: Slider) -> None:
        value = self.values[knob.key]
        shown = ui.label(knob.words(value))
        slider = ui.slider(min=knob.low, max=knob.high, step=knob.step, value=value)
        slider.mark(knob.key).props(f'dense aria-label="{knob.label}"')

        def moved(event: Any) -> None:
            self.values[knob.key] = float(event.value)
            shown.text = knob.words(float(event.value))
            self.changed()

        slider.on_value_change(moved)

    def chosen(self, event: Any) -> None:
        self.names = [row["schedule"] for row in event.selection]
        self.changed()

    def changed(self) -> None:
        self.frame.say("")
        self.clock.active = False
        with self.frame.show_errors():
            self.show()
            words = {"schedule": "|".join(self.names), **{key: f"{value:g}" for key, value in self.values.items()}}
            theme = {"theme": "dark"} if self.frame.theme == "dark" else {}
            ui.navigate.history.replace(f"/schedules?{urlencode({**words, **theme})}")

    def show(self) -> None:
        """Simulate every schedule that these sizes allow, and draw the selected ones on one time axis."""
        rows, self.timelines = [], {}
        for name in REGISTRY:
            try:
                self.timelines[name] = self.simulated(name)
            except SpecError as error:
                rows.append({**dict.fromkeys(HEADS, "–"), "schedule": name, "what": str(error)})
                continue
            rows.append(self.row(name))
        fastest = min((timeline.makespan_s for timeline in self.timelines.values()), default=1.0)
        for row in rows:
            if row["schedule"] in self.timelines:
                slower = self.timelines[row["schedule"]].makespan_s / fastest - 1
                row["delta"] = f"{slower:+.1%}" if slower > 1e-9 else "best"
        self.grid.rows = rows
        self.grid.selected = [row for row in rows if row["schedule"] in self.names]
        drawn = {name: self.timelines[name] for name in self.names if name in self.timelines}
        longest = max((timeline.makespan_s for timeline in drawn.values()), default=1.0)
        for name, chart in self.charts.items():
            figure = gantt(drawn[name], name, unit="forwards") if name in drawn else None
            if figure is not None:
                figure.update_xaxes(range=[0, longest])
            chart.show(figure)

    def sizes(self, name: str) -> tuple[int, int, int]:
        """Ranks, micro-batches, and the virtual stages nearest to those asked for that the schedule has."""
        spec, requested = REGISTRY[name], int(self.values["chunks"])
        chunks = max(spec.least_stages, min(spec.most_stages or requested, requested))
        return int(self.values["ranks"]), int(self.values["microbatches"]), chunks

    def simulated(self, name: str) -> Timeline:
        ranks, batches, chunks = self.sizes(name)
        sentence = legal(name, ranks, batches, chunks)
        if sentence is not None:
            raise SpecError(sentence)
        forward = 1 / chunks
        backward = forward * self.values["backward"]
        times = StageTimes.uniform(ranks * chunks, forward, backward / 2, backward / 2, self.values["send"])
        return simulate(build(name, ranks, batches, chunks), times)

    def row(self, name: str) -> dict[str, str]:
        ranks, batches, chunks = self.sizes(name)
        held = int(in_flight(name, ranks, list(range(ranks)), batches, chunks).max()) / chunks
        timeline = self.timelines[name]
        return {
            "schedule": name,
            "chunks": str(chunks),
            "bubble": f"{timeline.bubble_fraction:.1%}",
            "takes": f"{timeline.makespan_s:.2f}",
            "memory": f"{held:.3g}",
            "what": REGISTRY[name].label,
        }

    def play(self) -> None:
        """Uncover the step from the left, in some seconds."""
        self.played_s, self.clock.active = 0.0, True

    def tick(self) -> None:
        self.played_s += TICK_S
        share = min(1.0, self.played_s / PLAYED_S)
        self.clock.active = share < 1
        drawn = [name for name in self.names if name in self.timelines]
        longest = max((self.timelines[name].makespan_s for name in drawn), default=1.0)
        cover = {"type": "rect", "x0": share * longest, "x1": longest, "yref": "paper", "y0": 0, "y1": 1}
        cover |= {"fillcolor": style.PAPER[self.frame.theme], "line": {"width": 0}, "layer": "above"}
        for name in drawn:
            element = self.charts[name].element
            if element is not None:
                element.run_plot_method("relayout", {"shapes": [cover] if share < 1 else []})


def _columns() -> list[dict[str, Any]]:
    left = ("schedule", "what")
    return [
        {"name": name, "label": label, "field": name, "align": "left" if name in left else "right"}
        for name, label in HEADS.items()
    ]
