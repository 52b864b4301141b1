"""The schedules page: a pipeline schedule with sliders for ranks, micro-batches and times, animated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from nicegui import ui

from ultrascale.figures import style
from ultrascale.figures.plan import gantt
from ultrascale.schedules import REGISTRY, StageTimes, Timeline, build, legal, simulate
from ultrascale.specs.errors import SpecError
from ultrascale.studio.address import PlannerQuery
from ultrascale.studio.frame import Chart, Frame

PLAYED_S, TICK_S = 6.0, 0.1


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
    Slider("ranks", "ranks", 1, 16, 1, 4),
    Slider("microbatches", "micro-batches", 1, 64, 1, 8),
    Slider("chunks", "chunks per rank", 1, 8, 1, 1),
    Slider("backward", "a backward takes, in forwards", 1, 4, 0.1, 2),
    Slider("send", "a message takes, in forwards", 0, 0.5, 0.01, 0),
)


class Schedules:
    def __init__(self, ask: PlannerQuery, query: Mapping[str, str]) -> None:
        self.frame = Frame("/schedules", ask)
        name = query.get("schedule", "1f1b")
        self.name = name if name in REGISTRY else "1f1b"
        self.values = {knob.key: knob.read(query.get(knob.key)) for knob in SLIDERS}
        with ui.row().classes("w-full items-center gap-6"):
            chooser = ui.select(list(REGISTRY), label="Schedule", value=self.name, on_change=self.named)
            chooser.classes("w-44").props('outlined dense aria-label="schedule"').mark("schedule-name")
            for knob in SLIDERS:
                self.slider(knob)
            ui.button("Play", on_click=self.play).mark("play")
        self.what = ui.label("").classes("text-base")
        self.found = ui.label("").mark("bubble")
        self.chart = Chart(self.frame, "gantt")
        self.timeline: Timeline | None = None
        self.clock = ui.timer(TICK_S, self.tick, active=False)
        self.played_s = 0.0
        with self.frame.show_errors():
            self.show()

    def slider(self, knob: Slider) -> None:
        value = self.values[knob.key]
        with ui.column().classes("w-48 gap-0"):
            shown = ui.label(knob.words(value)).classes("text-sm")
            slider = ui.slider(min=knob.low, max=knob.high, step=knob.step, value=value)
            slider.mark(knob.key).props(f'aria-label="{knob.label}"')

            def moved(event: Any) -> None:
                self.values[knob.key] = float(event.value)
                shown.text = knob.words(float(event.value))
                self.draw()

            slider.on_value_change(moved)

    def named(self, event: Any) -> None:
        self.name = event.value
        self.draw()

    def draw(self) -> None:
        self.frame.say("")
        self.clock.active = False
        with self.frame.show_errors():
            self.show()
        words = {"schedule": self.name, **{key: f"{value:g}" for key, value in self.values.items()}}
        theme = {"theme": "dark"} if self.frame.theme == "dark" else {}
        ui.navigate.history.replace(f"/schedules?{urlencode({**words, **theme})}")

    def show(self) -> None:
        ranks, batches = int(self.values["ranks"]), int(self.values["microbatches"])
        spec, requested = REGISTRY[self.name], int(self.values["chunks"])
        chunks = max(spec.least_stages, min(spec.most_stages or requested, requested))
        self.what.text = spec.label
        sentence = legal(self.name, ranks, batches, chunks)
        if sentence is not None:
            raise SpecError(sentence)
        forward = 1 / chunks
        backward = forward * self.values["backward"]
        times = StageTimes.uniform(ranks * chunks, forward, backward / 2, backward / 2, self.values["send"])
        self.timeline = simulate(build(self.name, ranks, batches, chunks), times)
        self.found.text = (
            f"bubble {self.timeline.bubble_fraction:.1%}; a step takes {self.timeline.makespan_s:.2f} forwards of a whole "
            f"rank; {chunks} chunk{'s' if chunks > 1 else ''} per rank"
        )
        self.chart.show(gantt(self.timeline, self.name, unit="forwards"))

    def play(self) -> None:
        """Uncover the step from the left, in some seconds."""
        self.played_s, self.clock.active = 0.0, True

    def tick(self) -> None:
        if self.timeline is None or self.chart.element is None:
            return
        self.played_s += TICK_S
        share = min(1.0, self.played_s / PLAYED_S)
        if share == 1:
            self.clock.active = False
        now = share * self.timeline.makespan_s
        cover = {"type": "rect", "x0": now, "x1": self.timeline.makespan_s, "yref": "paper", "y0": 0, "y1": 1}
        cover |= {"fillcolor": style.PAPER[self.frame.theme], "line": {"width": 0}, "layer": "above"}
        self.chart.element.run_plot_method("relayout", {"shapes": [cover] if share < 1 else []})
