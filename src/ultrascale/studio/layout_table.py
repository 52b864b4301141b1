"""The table of layouts: a radio button, the fields of the layout in columns, its estimate and the difference to the best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nicegui import events, ui

from ultrascale.plan.search import LayoutPreview
from ultrascale.show.plan import knows_peak
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import seconds

MANUAL = -1  # the row of the manual layout
HEADS = {
    "rank": "#",
    "gpus": "GPUs",
    "dp": "dp",
    "tp": "tp",
    "pp": "pp",
    "cp": "cp",
    "ep": "ep",
    "zero": "ZeRO",
    "schedule": "schedule",
    "virtual": "virtual stages",
    "mbs": "mbs",
    "gas": "gas",
    "recompute": "recompute",
    "step": "step",
    "delta": "Δ best",
    "rate": "tokens/s/GPU",
    "mfu": "MFU",
    "peak": "peak GiB",
    "fits": "fits",
}
OPTIONAL = {
    "gpus",
    "cp",
    "ep",
    "schedule",
    "virtual",
    "recompute",
    "mfu",
}  # columns that are hidden where no row has something to say
LEFT = {"rank", "cp", "ep", "zero", "schedule", "recompute"}
RADIO = """<q-radio dense size="sm" :model-value="props.selected" :val="true" @update:model-value="props.selected = true"
  :aria-label="'layout ' + props.row.rank" />"""
FITS = """<q-td :props="props"><span :class="props.row.risky ? 'us-bad' : ''">{{ props.value }}</span></q-td>"""


class LayoutTable:
    def __init__(self, picked: Callable[[int], None]) -> None:
        self.picked = picked
        self.grid = ui.table(columns=[], rows=[], row_key="number", selection="single", on_select=self._selected)
        self.grid.classes("full-width us-layouts").props("flat dense hide-pagination hide-selected-banner hide-no-data")
        self.grid.props(":rows-per-page-options=[0]").mark("layouts")
        self.grid.add_slot("body-selection", RADIO)
        self.grid.add_slot("body-cell-fits", FITS)
        self.grid.set_visibility(False)
        self.grid.on("row-click", self._clicked, [[], ["number"], None])

    def show(self, rows: Sequence[dict[str, Any]], selected: int | None = None) -> None:
        names = [name for name in HEADS if name not in OPTIONAL or any(row[name] for row in rows)]
        self.grid.columns = [
            {"name": name, "label": HEADS[name], "field": name, "align": "left" if name in LEFT else "right"} for name in names
        ]
        self.grid.rows = list(rows)
        self.grid.set_visibility(bool(rows))
        self.grid.selected = [row for row in rows if row["number"] == selected]

    def _selected(self, event: events.TableSelectionEventArguments) -> None:
        if event.selection:
            self.picked(event.selection[0]["number"])

    def _clicked(self, event: events.GenericEventArguments) -> None:
        number = event.args[1]["number"]
        self.grid.selected = [row for row in self.grid.rows if row["number"] == number]
        self.picked(number)


def plan_row(number: int, plan: Plan, best: Plan, gpus: bool = False) -> dict[str, Any]:
    found = plan.estimate
    slower = found.step_time_s / best.estimate.step_time_s - 1
    chance = found.range.fit_probability if found.range is not None else float(found.fits)
    return {
        "number": number,
        "rank": "manual" if number == MANUAL else str(number + 1),
        "gpus": f"{plan.layout.gpus:,}" if gpus else "",
        **layout_cells(plan.layout),
        "step": seconds(found.step_time_s),
        "delta": "best" if plan is best else f"{slower:+.1%}",
        "rate": f"{found.tokens_per_s_per_gpu:,.0f}",
        "mfu": f"{found.mfu_causal:.1%}" if knows_peak(plan.job) else "",
        "peak": f"{found.peak_gib:,.1f}",
        "fits": f"{chance:.0%}",
        "risky": chance < 0.5,
    }


def preview_rows(job: Job, ranked: Sequence[LayoutPreview]) -> list[dict[str, Any]]:
    """Layouts by closed forms, until the best are simulated."""
    return [
        {
            "number": -2 - number,
            "rank": str(number + 1),
            "gpus": "",
            **layout_cells(one.layout),
            "step": f"≈ {seconds(one.step_time_s)}",
            "delta": f"≈ {one.step_time_s / ranked[0].step_time_s - 1:+.1%}",
            "rate": f"≈ {one.layout.batch_tokens(job.seq) / one.step_time_s / one.layout.gpus:,.0f}",
            "mfu": "…",
            "peak": "…",
            "fits": "…",
        }
        for number, one in enumerate(ranked)
    ]


def layout_cells(layout: Layout) -> dict[str, str]:
    """The fields of a layout by column; empty where the technique is off and its column may be hidden."""
    zero = [str(layout.zero)]
    zero += [f"HSDP {layout.zero_shards}"] if layout.zero_shards else []
    zero += ["no reshard"] if layout.keep_gathered else []
    some = f", {layout.recompute_layers} layers" if layout.recompute_layers else ""
    again: list[str] = [layout.recompute + some] if layout.recompute != "none" else []
    again += [f"{layout.offload} offload"] if layout.offload != "none" else []
    return {
        **{name: str(getattr(layout, name)) for name in ("dp", "tp", "pp", "mbs", "gas")},
        "cp": f"{layout.cp} {layout.context_parallel}" if layout.cp > 1 else "",
        "ep": f"{layout.ep} {layout.dispatcher}" if layout.ep > 1 else "",
        "zero": ", ".join(zero),
        "schedule": layout.schedule if layout.pp > 1 else "",
        "virtual": str(layout.virtual_stages) if layout.virtual_stages > 1 else "",
        "recompute": ", ".join(again),
    }


def layout_words(layout: Layout) -> str:
    """`dp 32 · tp 8 · ZeRO 3, HSDP 4 · mbs 1 · gas 4`"""
    cells = layout_cells(layout)
    shown = [name for name in ("dp", "tp", "pp", "cp", "ep") if getattr(layout, name) > 1] or ["dp"]
    parts = [f"{name} {cells[name]}" for name in shown]
    loops = f", {layout.virtual_stages} virtual stages" if cells["virtual"] else ""
    again = f"{cells['recompute']} recompute" if layout.recompute != "none" else cells["recompute"]
    parts += [f"ZeRO {cells['zero']}", cells["schedule"] + loops, f"mbs {layout.mbs} · gas {layout.gas}", again]
    return " · ".join(part for part in parts if part)
