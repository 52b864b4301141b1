"""The form of the job: model, cluster, batch, precision and constraints; a wrong field is marked with its error."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, get_args

from nicegui import ui

from ultrascale.plan.candidates import OBJECTIVES
from ultrascale.specs.errors import SpecError
from ultrascale.specs.framework import Framework
from ultrascale.specs.gpu import GPU
from ultrascale.specs.job import Job, Optimizer, Precision
from ultrascale.specs.model import Model
from ultrascale.studio.address import LONGEST, PlannerQuery, pasted

Changed = Callable[[dict[str, str]], Awaitable[None]]


class JobForm:
    def __init__(self, ask: PlannerQuery, changed: Changed) -> None:
        self.changed, self.filling = changed, False
        self.controls: dict[str, ui.select | ui.input] = {}
        with ui.element("section").classes("us-card"):
            ui.html("<h2>Model and cluster</h2>", sanitize=False)
            with ui.element("div").classes("us-fields"):
                with ui.element("div").classes("us-all us-model"):
                    self._select("model", "Model", list(Model.presets()), ask)
                    paste = ui.button(icon="content_paste", on_click=self.paste).props("flat dense")
                    paste.props('aria-label="Paste a model" title="Paste a model (YAML or config.json)"')
                self.shape = ui.label("").classes("us-soft us-all us-message-line")
                self._select("framework", "Engine", list(Framework.presets()), ask, wide=True)
                self._select("gpu", "GPU", list(GPU.presets()), ask)
                self._select("precision", "Precision", list(get_args(Precision)), ask)
                self._input("nodes", "Nodes", ask)
                self._input("per_node", "GPUs per node", ask)
                self._input("batch", "Batch (tokens)", ask)
                self._input("seq", "Sequence (tokens)", ask)
                self._select("optimizer", "Optimizer", list(get_args(Optimizer)), ask)
                self._select("gradients", "Gradients", list(get_args(Job.model_fields["gradients"].annotation)), ask)
                self._select("objective", "Objective", list(OBJECTIVES), ask, wide=True)
                self._input("fix", "Fix, such as tp=8,zero=1", ask, wide=True)
                self._input("forbid", "Forbid, such as cp", ask, wide=True)

    def fill(self, ask: PlannerQuery) -> None:
        """Set the controls to an address, without answering to each."""
        self.filling = True
        for name, control in self.controls.items():
            value = getattr(ask, name)
            if not isinstance(control, ui.select) or value in control.options:
                control.value = value
        self.filling = False

    def mark(self, errors: Mapping[str, str]) -> None:
        """Mark the fields that have an error, and no others."""
        for name, control in self.controls.items():
            control.error = errors.get(name)
        self.shape.text = errors.get("shape", "")

    def _select(self, name: str, label: str, options: list[str], ask: PlannerQuery, wide: bool = False) -> None:
        value = getattr(ask, name)
        known = value if value in options else options[0]
        self._place(name, label, ui.select(options, label=label, value=known, with_input=len(options) > 12), wide)

    def _input(self, name: str, label: str, ask: PlannerQuery, wide: bool = False) -> None:
        self._place(name, label, ui.input(label, value=getattr(ask, name)).props("maxlength=200"), wide)

    def _place(self, name: str, label: str, control: ui.select | ui.input, wide: bool) -> None:
        control.classes("us-all" if wide else "").mark(name).props(f'dense outlined hide-bottom-space aria-label="{label}"')
        self.controls[name] = control

        async def moved(event: Any) -> None:
            if not self.filling:
                values = {name: str(event.value or "").strip()}
                await self.changed(values | ({"shape": ""} if name == "model" else {}))

        control.on_value_change(moved)

    def paste(self) -> None:
        with ui.dialog() as dialog, ui.card().classes("us-dialog"):
            ui.label("A model file (YAML) or a Hugging Face config.json")
            text = ui.textarea().props(f'outlined maxlength={LONGEST} aria-label="model"').classes("full-width").mark("shape")
            problem = ui.label("").classes("us-bad")

            async def take() -> None:
                try:
                    pasted(text.value or "")
                except SpecError as error:
                    problem.text = str(error)
                    return
                dialog.close()
                await self.changed({"shape": text.value or ""})

            with ui.row():
                ui.button("Use it", on_click=take).props("no-caps")
                ui.button("Cancel", on_click=dialog.close).props("flat no-caps")
        dialog.open()
