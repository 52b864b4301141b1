"""`ultrascale train` and `verify` in the terminal: predicted beside measured, and layouts beside one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ultrascale.show.lines import labelled
from ultrascale.specs.estimate import Estimate
from ultrascale.specs.measurement import MeasuredTime, Measurement
from ultrascale.specs.units import GIB, seconds

if TYPE_CHECKING:
    from ultrascale.measure.verify import Difference
    from ultrascale.train.launch import Run

COMPUTING = ("matmul_s", "attention_s", "memory_bound_s", "recompute_s", "launch_s")
# What is on its way and what waits for backward look alike from outside: they are compared together.
SHOWN = {
    **{owner: (owner,) for owner in ("parameters", "master", "gradients", "optimizer")},
    "activations, buffers": ("activations", "buffers"),
}
OWNERS = tuple(owner for owners in SHOWN.values() for owner in owners)


def show_end(console: Console, run: Run) -> None:
    """What a run came to: predicted beside measured, or where it was stopped; and where it lies."""
    outcome, again = run.outcome, f"ultrascale train --resume {run.folder}"
    if outcome.measured is not None:
        show_comparison(console, run)
    if outcome.stopped is not None:
        kept = f"; kept in {outcome.kept.name}: go on with {again}" if outcome.kept else "; nothing was kept"
        line = f"stopped by {outcome.stopped} after step {outcome.step} of {run.request.training.steps}{kept}"
        console.print(line, soft_wrap=True)  # a command in one piece, to copy
    elif outcome.measured is None:
        line = f"all {outcome.step} steps were done already; for more: {again} --steps {2 * outcome.step}"
        console.print(line, soft_wrap=True)
    console.print(f"The run is in {run.folder}", soft_wrap=True)


def show_comparison(console: Console, run: Run) -> None:
    """Predicted, measured, difference: what a step took and what a rank held."""
    table = Table(title="predicted and measured, one step", title_justify="left", title_style="bold")
    table.add_column("")
    for column in ("predicted", "measured", "difference"):
        table.add_column(column, justify="right")
    for label, predicted, measured, unit in comparison(run.predicted, run.measured):
        seen = "not measured" if measured is None else _shown(measured, unit)
        table.add_row(label, _shown(predicted, unit), seen, _difference(predicted, measured))
    console.print(table)
    for note in run.measured.notes:
        labelled(console, "note:", "yellow", note)


Row = tuple[str, float | None, float | None, str]


def comparison(predicted: Estimate | None, measured: Measurement) -> list[Row]:
    """Label, predicted, measured, unit; None where one side does not know."""
    rows: list[Row] = [
        ("step time", predicted.step_time_s if predicted else None, measured.step_time_s, "s"),
        ("tokens/s/GPU", predicted.tokens_per_s_per_gpu if predicted else None, measured.tokens_per_s_per_gpu, ""),
    ]
    if measured.mfu is not None:
        rows.append(("MFU", predicted.mfu if predicted else None, measured.mfu, "%"))
    rows += _time_rows(predicted, measured.time)
    stage = measured.memory[measured.peak_stage]
    held = predicted.memory[measured.peak_stage].memory if predicted else None
    where = f" (stage {stage.stage})" if len(measured.memory) > 1 else ""
    # Tensors on both sides: a CUDA context or an allocator's holes are nobody's.
    tensors = [sum(getattr(side, owner) for owner in OWNERS) if side else None for side in (held, stage.memory)]
    rows.append((f"tensors at the peak{where}", tensors[0], tensors[1], "B"))
    for label, owners in SHOWN.items():
        before, seen = (sum(getattr(side, owner) for owner in owners) if side else None for side in (held, stage.memory))
        if before or seen:
            rows.append((f"  {label}", before, seen, "B"))
    return rows


def _time_rows(predicted: Estimate | None, measured: MeasuredTime) -> list[Row]:
    time = predicted.time if predicted else None

    def together(*causes: str) -> float | None:
        return sum(getattr(time, cause) for cause in causes) if time else None

    rows: list[Row] = [
        ("  computing", together(*COMPUTING), measured.computing_s, "s"),
        ("  tensor exchange", together("tensor_s"), measured.tensor_s, "s"),
        ("  context exchange", together("context_s"), measured.context_s, "s"),
        ("  expert exchange", together("expert_s"), measured.expert_s, "s"),
        ("  gradient reduction", together("data_s"), measured.data_s, "s"),
        ("  ZeRO exchange", together("zero_s"), measured.zero_s, "s"),
        ("  waiting for stages", together("bubble_s", "send_s"), measured.bubble_s, "s"),
        ("  optimizer", together("optimizer_s"), measured.optimizer_s, "s"),
        ("  reading data", None, measured.overhead_s, "s"),
    ]
    return [row for row in rows if row[1] or row[2]]


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    if unit == "s":
        return seconds(value)
    if unit == "%":
        return f"{value:.1%}"
    if unit == "B":
        return f"{value / GIB:,.2f} GiB" if value >= GIB / 10 else f"{value / 2**20:,.2f} MiB"
    return f"{value:,.0f}"


def _difference(predicted: float | None, measured: float | None) -> str:
    """Of the prediction, relative to what was measured."""
    return f"{predicted / measured - 1:+.1%}" if predicted and measured else ""


def run_json(run: Run) -> dict[str, Any]:
    return {
        "folder": None if run.folder is None else str(run.folder),
        "layout": run.request.layout.model_dump(mode="json"),
        "predicted": None if run.predicted is None else run.predicted.model_dump(mode="json"),
        "step": run.outcome.step,
        "stopped": run.outcome.stopped,
        "checkpoint": None if run.outcome.kept is None else str(run.outcome.kept),
        "measured": None if run.outcome.measured is None else run.outcome.measured.model_dump(mode="json"),
    }


def verify_row(difference: Difference) -> str:
    mark = "ok  " if difference.ok else "DIFFERS"
    if difference.problem:
        return f"{mark} {difference.layout}: {difference.problem}"
    return f"{mark} loss {difference.loss_error:.1e}  gradient {difference.grad_error:.1e}  {difference.layout}" + (
        "" if difference.ok else f"  (worst: {difference.worst})"
    )


def verify_json(differences: Sequence[Difference]) -> dict[str, Any]:
    def number(value: float) -> float | None:
        return value if value < float("inf") else None

    return {
        "layouts": [
            {
                "layout": one.layout.model_dump(mode="json"),
                "loss_error": number(one.loss_error),
                "grad_error": number(one.grad_error),
                "ok": one.ok,
                "worst": one.worst,
                "problem": one.problem or None,
            }
            for one in differences
        ]
    }
