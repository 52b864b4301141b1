"""Controls for every field of a layout; memory and time follow at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from nicegui import ui

from ultrascale.plan.reasons import with_batch
from ultrascale.specs.errors import divisors
from ultrascale.specs.layout import Layout
from ultrascale.specs.plan import Plan
from ultrascale.studio.address import changes_text
from ultrascale.studio.frame import Frame

DEGREES = ("tp", "pp", "cp", "ep", "mbs")
CHOICES = (
    "zero",
    "recompute",
    "schedule",
    "virtual_stages",
    "context_parallel",
    "sequence_parallel",
    "keep_gathered",
    "offload",
)


class LayoutEditor:
    def __init__(self, frame: Frame, cut: Callable[[Layout, str], str | None]) -> None:
        self.frame, self.cut = frame, cut
        self.best: Layout | None = None
        self.plan: Plan | None = None
        self.changes: dict[str, Any] = {}
        ui.label("dp and the accumulation steps follow from the GPUs and the batch.").classes("text-sm")
        self.controls = ui.column().classes("w-full gap-1")
        self.problem = ui.label("").classes("text-negative").mark("cut-problem")

    def begin(self, plan: Plan) -> None:
        """Controls at a plan's values."""
        self.plan, self.best, self.changes = plan, plan.layout, {}
        self.problem.text = ""
        self.controls.clear()
        with self.controls:
            for name in DEGREES:
                if name != "ep" or plan.job.model.moe is not None:
                    self._slider(name, self._degrees(plan, name))
            with ui.row():
                for name in CHOICES:
                    self._select(name, _options(name), getattr(plan.layout, name))

    def _degrees(self, plan: Plan, name: str) -> list[int]:
        job = plan.job
        whole = {"mbs": job.sequences, "ep": job.model.moe.experts if job.model.moe else 1}.get(name, job.cluster.gpus)
        limit = {"tp": job.model.heads, "pp": job.model.layers, "cp": max(1, job.seq // 128)}.get(name, whole)
        return [value for value in divisors(whole) if value <= min(limit, 4096)]

    def _slider(self, name: str, values: list[int]) -> None:
        assert self.plan is not None
        now = getattr(self.plan.layout, name)
        places = sorted({*values, now})
        with ui.row().classes("w-full no-wrap items-center"):
            shown = ui.label(f"{name} {now}").classes("w-20")
            slider = ui.slider(min=0, max=max(1, len(places) - 1), step=1, value=places.index(now)).mark(f"cut-{name}")
            slider.props(f'snap markers aria-label="{name}"')

            def moved(event: Any) -> None:
                value = places[min(int(event.value), len(places) - 1)]
                shown.text = f"{name} {value}"
                self._changed(name, value)

            slider.on_value_change(moved)

    def _select(self, name: str, options: list[Any], value: Any) -> None:
        labels = {option: str(option).lower() for option in options}
        select = ui.select(labels, label=name.replace("_", " "), value=value).classes("w-36").mark(f"cut-{name}")
        select.props(f'dense outlined aria-label="{name}"')
        select.on_value_change(lambda event: self._changed(name, event.value))

    def _changed(self, name: str, value: Any) -> None:
        assert self.plan is not None
        assert self.best is not None
        self.changes[name] = value
        with self.frame.show_errors():
            layout = with_batch(self.plan.job, self.best, **self.changes)
            if layout is None:
                gpus, sequences = self.plan.job.cluster.gpus, self.plan.job.sequences
                self.problem.text = f"{gpus} GPUs and {sequences} sequences cannot be cut so"
                return
            self.problem.text = self.cut(layout, changes_text(self.changes)) or ""


def _options(name: str) -> list[Any]:
    if name == "zero":
        return [0, 1, 2, 3]
    if name == "virtual_stages":
        return [1, 2, 3, 4, 6, 8]
    annotation = Layout.model_fields[name].annotation
    return [False, True] if annotation is bool else list(get_args(annotation))
