"""The cheat-sheet, live: every formula of the playbook with this plan's numbers in it."""

from __future__ import annotations

from nicegui import ui

from ultrascale.cost import cheatsheet
from ultrascale.specs.plan import Plan
from ultrascale.studio.frame import table


class Sheet:
    def __init__(self) -> None:
        self.place = ui.column().classes("w-full")

    def show(self, plan: Plan) -> None:
        self.place.clear()
        with self.place:
            formulas = [(one.name, one.form, one.value) for one in cheatsheet.formulas(plan)]
            table(("quantity", "formula", "here"), formulas, "formulas")
            table(cheatsheet.HEADINGS, [one.cells for one in cheatsheet.strategies(plan)], "techniques")
