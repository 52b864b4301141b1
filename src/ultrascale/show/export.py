"""Output of `ultrascale export` and `import`: files and what they cannot express; the plan that was read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from ultrascale.export.header import NOT_EXPRESSIBLE
from ultrascale.export.read import ImportedPlan
from ultrascale.show.explain import show_plan
from ultrascale.show.lines import bullets, heading, notes
from ultrascale.specs.units import seconds


def show_written(console: Console, written: list[Path], comments: list[str], follows: str) -> None:
    for file in written:
        console.print(f"Wrote {file}", soft_wrap=True)
    lost = [line.removeprefix(f"{NOT_EXPRESSIBLE}: ") for line in comments if line.startswith(NOT_EXPRESSIBLE)]
    if lost:
        heading(console, "Not expressible there (also in the file)")
        bullets(console, lost)
    console.print(f"Next: {follows}", soft_wrap=True)


def show_imported(console: Console, found: ImportedPlan) -> None:
    console.print(f"A file for {found.engine.title}.")
    notes(console, found.notes)
    show_plan(console, found.plan)
    there = found.native
    if there is not None:
        e = there.estimate
        verdict = "fits" if e.fits else "does not fit"
        console.print(
            f"As {found.engine.framework} would run it: step {seconds(e.step_time_s)}, "
            f"{e.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, peak {e.peak_gib:,.1f} GiB of {e.capacity_gib:,.1f}: it {verdict}"
        )


def imported_json(found: ImportedPlan) -> dict[str, Any]:
    there = found.native
    return {
        "engine": found.engine.name,
        "notes": found.notes,
        "plan": found.plan.to_mapping(),
        "there": there and {"framework": found.engine.framework, "estimate": there.estimate},
    }
