"""Controls for every field of a layout; memory and time follow at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from nicegui import ui

from ultrascale.plan.reasons import with_batch
from ultrascale.specs.engine import EngineLimits
from ultrascale.specs.errors import divisors
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.plan import Plan
from ultrascale.studio.frame import Frame

DEGREES = ("tp", "pp", "cp", "ep", "mbs")
LABELS = {
    "zero": "ZeRO",
    "zero_shards": "HSDP shards",
    "keep_gathered": "no reshard",
    "recompute": "recompute",
    "recompute_layers": "recompute layers",
    "schedule": "schedule",
    "virtual_stages": "virtual stages",
    "context_parallel": "context parallel",
    "dispatcher": "dispatcher",
    "sequence_parallel": "sequence parallel",
    "offload": "offload",
}


class LayoutEditor:
    def __init__(self, frame: Frame, edited: Callable[[Layout], str | None]) -> None:
        self.frame, self.edited = frame, edited
        self.plan: Plan | None = None
        self.changes: dict[str, Any] = {}
        with ui.element("section").classes("us-card us-manual"):
            ui.html("<h2>Manual layout</h2>", sanitize=False)
            self.controls = ui.element("div").classes("full-width")
            self.following = ui.label("Choose a layout to change it.").classes("us-soft")
            self.problem = ui.label("").classes("us-bad").props('role="status"').mark("layout-problem")

    def begin(self, plan: Plan) -> None:
        """Controls at a plan's values."""
        self.plan, self.changes = plan, {}
        self.problem.text = ""
        self.controls.clear()
        with self.controls:
            for name in DEGREES:
                if name != "ep" or plan.job.model.moe is not None:
                    self._slider(name, _runs(plan.job, name, _degrees(plan.job, name)))
            with ui.element("div").classes("us-fields").style("margin-top: 8px"):
                for name in LABELS:
                    if name != "dispatcher" or len(_runs(plan.job, "ep", _degrees(plan.job, "ep"))) > 1:
                        self._select(name, _runs(plan.job, name, _options(name, plan.job)), getattr(plan.layout, name))
        self._follow(plan.layout)

    def clear(self) -> None:
        """No controls: there is no layout to change."""
        self.plan = None
        self.controls.clear()
        self.problem.text, self.following.text = "", "There is no layout to change."

    def _slider(self, name: str, values: list[int]) -> None:
        assert self.plan is not None
        now = getattr(self.plan.layout, name)
        places = sorted({*values, now})
        with ui.element("div").classes("us-slider"):
            shown = ui.label(f"{name} {now}").props(f'title="{_meaning(name)}"')
            slider = ui.slider(min=0, max=max(1, len(places) - 1), step=1, value=places.index(now)).mark(f"layout-{name}")
            slider.props(f'snap markers dense aria-label="{name}"').set_enabled(len(places) > 1)

            def moved(event: Any) -> None:
                value = places[min(int(event.value), len(places) - 1)]
                shown.text = f"{name} {value}"
                self._changed(name, value)

            slider.on_value_change(moved)

    def _select(self, name: str, options: list[Any], value: Any) -> None:
        # A plan may have a value that is not among the usual ones, such as 5 virtual stages of 70B's 80 layers.
        labels = {option: _option_words(option) for option in (options if value in options else [*options, value])}
        select = ui.select(labels, label=LABELS[name], value=value).mark(f"layout-{name}")
        select.props(f'dense outlined aria-label="{LABELS[name]}" title="{_meaning(name)}"')
        select.on_value_change(lambda event: self._changed(name, event.value))

    def _changed(self, name: str, value: Any) -> None:
        assert self.plan is not None
        self.changes[name] = value
        with self.frame.show_errors():
            job = self.plan.job
            layout = with_batch(job, self.plan.layout, **self.changes)
            if layout is None:
                wanted = ", ".join(f"{name} {_option_words(value)}" for name, value in self.changes.items())
                self.problem.text = f"{job.cluster.gpus} GPUs and {job.sequences} sequences do not divide by {wanted}."
                return
            self.problem.text = self.edited(layout) or ""
            self._follow(layout)

    def _follow(self, layout: Layout) -> None:
        self.following.text = f"From the GPUs and the batch follow dp {layout.dp} and gas {layout.gas}."


def _meaning(name: str) -> str:
    return Layout.model_fields[name].description or ""


def _runs(job: Job, name: str, values: list[Any]) -> list[Any]:
    """The values that the job's engine runs."""
    engine = job.framework.engine
    runs = EngineLimits.load(engine).layout.get(name, values) if engine else values
    return [value for value in values if value in runs]


def _degrees(job: Job, name: str) -> list[int]:
    whole = {"mbs": job.sequences, "ep": job.model.moe.experts if job.model.moe else 1}.get(name, job.cluster.gpus)
    limit = {"tp": job.model.heads, "pp": job.model.layers, "cp": max(1, job.seq // 128)}.get(name, whole)
    return [value for value in divisors(whole) if value <= min(limit, 4096)]


def _options(name: str, job: Job) -> list[Any]:
    if name == "zero":
        return [0, 1, 2, 3]
    if name == "virtual_stages":
        return sorted({*range(1, 9), *divisors(job.model.layers)})
    if name == "zero_shards":
        return [None, *(value for value in divisors(job.cluster.gpus) if 1 < value < job.cluster.gpus)]
    if name == "recompute_layers":
        return [None, *range(1, job.model.layers)]
    annotation = Layout.model_fields[name].annotation
    return [False, True] if annotation is bool else list(get_args(annotation))


def _option_words(option: Any) -> str:
    return "all" if option is None else {False: "no", True: "yes"}[option] if isinstance(option, bool) else str(option)
