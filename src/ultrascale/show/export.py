"""Output of `ultrascale export` and `import`: files and what they cannot express; the plan that was read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from ultrascale.export.check import ChangedField, ExportCheck
from ultrascale.export.header import NOT_EXPRESSIBLE
from ultrascale.export.read import ImportedPlan
from ultrascale.export.targets import EngineExport
from ultrascale.show.explain import show_plan
from ultrascale.show.lines import attributes, bullets, heading, labelled, notes
from ultrascale.specs.framework import Framework
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import seconds


def show_exported(console: Console, plan: Plan, exported: EngineExport, written: list[Path]) -> None:
    for check in exported.checks:
        _show_check(console, plan, check)
    for file in written:
        console.print(f"Wrote {file}", soft_wrap=True)
    lost = [line.removeprefix(f"{NOT_EXPRESSIBLE}: ") for line in exported.comments if line.startswith(NOT_EXPRESSIBLE)]
    if lost and written:
        heading(console, "Not expressible there (also in the file)")
        bullets(console, lost)
    if written:
        console.print(f"Next: {exported.next_command}", soft_wrap=True)
    else:
        own = exported.checks[0].engine.framework
        console.print(f"Nothing was written: plan with --framework {own}, or write it with --allow-different")


def _show_check(console: Console, plan: Plan, check: ExportCheck) -> None:
    """What the engine does with the file, beside the plan in that engine."""
    planned, engine = check.planned, check.engine
    if plan.job.framework.engine != Framework.load(engine.framework).engine:
        note = f"the plan is for {plan.job.framework.name}; {engine.title} is counted as {engine.framework}"
        labelled(console, "note:", "yellow", note)
    if check.actual is None:
        labelled(console, "differs:", "red", f"{engine.title} cannot run the file")
    else:
        there = (
            f"{engine.title} runs it in {seconds(check.actual.step_time_s)} per step, {check.actual.peak_gib:,.1f} GiB per GPU"
        )
        here = f"planned {seconds(planned.step_time_s)}, {planned.peak_gib:,.1f} GiB"
        verdict = ("as planned:", "green") if check.same else ("differs:", "red")
        labelled(console, *verdict, f"{there} ({here})")
        if not check.actual.fits:
            elsewhere = f"; in {plan.job.framework.name} it needs {plan.estimate.peak_gib:,.1f}" if check.plan_fits else ""
            labelled(console, "does not fit:", "red", f"there are {check.actual.capacity_gib:,.1f} GiB{elsewhere}")
    if not check.same:
        shape = [one for one in check.differences if one.field.startswith("model.")]
        bullets(console, [_cost(one) for one in check.differences if one not in shape])
        if shape:
            names = dict.fromkeys(one.field.split(".")[1] for one in shape)
            bullets(console, [f"model: other {', '.join(names)} ({shape[0].why})"])


def _cost(one: ChangedField) -> str:
    cost = "" if one.step_time is None or one.peak_gib is None else f" costs {one.step_time:+.1%} time, {one.peak_gib:+.1f} GiB"
    return f"{one.field}: {one.actual} instead of {one.planned}{cost} ({one.why})"


def exported_json(exported: EngineExport, written: list[Path]) -> dict[str, Any]:
    checks = [
        {
            "engine": check.engine.title,
            "same": check.same,
            "planned": attributes(check.planned, "step_time_s", "peak_gib"),
            "actual": check.actual and attributes(check.actual, "step_time_s", "peak_gib"),
            "differences": check.differences,
        }
        for check in exported.checks
    ]
    return {"written": written, "header": exported.comments, "next": exported.next_command, "checks": checks}


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
