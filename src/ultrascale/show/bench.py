"""Output of `ultrascale bench`: hardware, collectives, ladders, layouts; tables and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ultrascale.cost.hardware import UNMEASURED_MATMUL, sustained
from ultrascale.show.lines import attributes, bullets, heading, labelled, table, terminal
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.units import seconds

if TYPE_CHECKING:
    from ultrascale.measure.bench_collectives import AlphaBetaFit, CollectivesReport, CollectiveTiming
    from ultrascale.measure.bench_ladders import Figures, Ladder, Rung
    from ultrascale.measure.bench_layouts import CandidateSet, Sweep, SweepVerdict, TrialRecord, TrialRow

# Hardware


def show_hardware(console: Console, cluster: Cluster, file: Path | None) -> None:
    gpu, constants = cluster.gpu, cluster.efficiency
    heading(console, f"{cluster.label}, measured")
    grid = Table(box=None, pad_edge=False)
    for name in ("what", "measured", "of"):
        grid.add_column(name, justify="right" if name == "measured" else "left")
    if gpu.surface is None:
        flops = max(gpu.peak_tflops.values()) * UNMEASURED_MATMUL * (constants.matmul or 1.0)
        grid.add_row("matmuls", f"{flops:,.3g} TFLOP/s", "each process, while all work")
        grid.add_row("memory", f"{gpu.memory_bandwidth_gb_s * constants.memory_bandwidth:,.0f} GB/s", "read and written")
    else:
        usual = sustained(gpu)["bf16"]
        grid.add_row("matmuls", f"{100 * (constants.matmul or usual):.0f} %", f"the GPU kind's table; long runs {usual:.0%}")
        grid.add_row("memory", f"{100 * constants.memory_bandwidth:.0f} %", f"{gpu.memory_bandwidth_gb_s:,.0f} GB/s")
    for name, share in (("forward", constants.attention_forward), ("backward", constants.attention_backward)):
        if share is not None:
            grid.add_row(f"attention, {name}", f"{100 * share:.0f} %", "the matmul peak, in long rows")
    grid.add_row("kernel launch", f"{1e6 * constants.kernel_launch_s:.1f} µs", "host time")
    console.print(grid)
    if file is not None:
        console.print(f"written to {file}: `ultrascale plan --cluster {file} …` plans with it")


# Collectives


def show_collectives(console: Console, report: CollectivesReport) -> None:
    columns = ("collective", "ranks", "bytes", "median", "one in ten below", "one in ten above", "algorithm GB/s", "bus GB/s")
    grid, before = table(f"collectives: {report.where}", *columns), None
    for point in report.points:
        if before is not None and before != (point.op, point.ranks):
            grid.add_section()
        before = point.op, point.ranks
        grid.add_row(*_timing_cells(point))
    console.print(grid)
    title = "latency and bandwidth: time = alpha + bytes on the wire / beta"
    fitted = table(title, "collective", "ranks", "alpha", "beta GB/s", "median error")
    for fit in report.fits:
        fitted.add_row(*_fit_cells(fit))
    console.print(fitted)
    for missing in report.missing:
        labelled(console, f"{missing.op} on {missing.ranks}:", "bold red", missing.reason)


def _timing_cells(point: CollectiveTiming) -> tuple[str, ...]:
    times = seconds(point.median_s), seconds(point.low_s), seconds(point.high_s)
    if not point.bytes:
        return point.op, str(point.ranks), "–", *times, "–", "–"
    return point.op, str(point.ranks), _size(point.bytes), *times, f"{point.algorithm_gb_s:.3g}", f"{point.bus_gb_s:.3g}"


def _fit_cells(fit: AlphaBetaFit) -> tuple[str, ...]:
    beta = "–" if fit.beta_gb_s is None else f"{fit.beta_gb_s:,.3g}"
    return fit.op, str(fit.ranks), seconds(fit.alpha_s), beta, f"{fit.error:.0%}"


def _size(value: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:,.4g} {unit}"
    return f"{value} B"


def collectives_json(report: CollectivesReport) -> dict[str, Any]:
    points = [{**vars(point), **attributes(point, "algorithm_gb_s", "bus_gb_s")} for point in report.points]
    return {"where": report.where, "points": points, "fits": report.fits, "missing": report.missing}


# Ladders

FIGURES = {"step_s": "step", "tensors_gib": "tensors", "exposed_s": "exposed communication", "bubble_s": "bubble"}


def show_ladder(console: Console, ladder: Ladder) -> None:
    columns = ("rung", "what it is", *(f"{name} (predicted)" for name in FIGURES.values()), "loss", "gain")
    grid = table(f"{ladder.name}: {ladder.what}", *columns, left=("rung", "what it is", "gain"))
    for rung, gain in zip(ladder.rungs, gains(ladder.rungs), strict=True):
        if rung.measured is None:
            grid.add_row(rung.name, rung.what, *("–" for _ in range(len(FIGURES) + 1)), rung.problem)
        else:
            grid.add_row(rung.name, rung.what, *_ladder_cells(rung.measured, rung.predicted), f"{rung.loss:.4f}", gain)
    console.print(grid)


def gains(rungs: Sequence[Rung]) -> list[str]:
    """The gain of each rung over the one that ran before it."""
    found, before = [], None
    for rung in rungs:
        if rung.measured is None or before is None:
            found.append("–")
        else:
            memory = rung.measured.tensors_gib / before.tensors_gib - 1
            found.append(f"{before.step_s / rung.measured.step_s:.2f}× the speed, {memory:+.0%} memory")
        before = rung.measured or before
    return found


def _ladder_cells(measured: Figures, predicted: Figures | None) -> list[str]:
    """Measured figures, with the prediction in brackets."""

    def shown(side: Figures | None, name: str) -> str:
        value = None if side is None else getattr(side, name)
        if value is None or name != "tensors_gib":
            return "–" if value is None else seconds(value)
        return f"{value:,.2f} GiB" if value >= 0.1 else f"{value * 1024:,.1f} MiB"

    return [f"{shown(measured, name)} ({shown(predicted, name)})" for name in FIGURES]


# Layouts

TRIAL_STYLES = {"measured": "green", "running": "yellow", "stopped early": "cyan", "failed": "bold red", "waiting": "dim"}


@contextmanager
def watching(candidates: CandidateSet) -> Iterator[Callable[[Sweep], None]]:
    """On a terminal a table that is redrawn; elsewhere a line for each trial that ends. Both on the error stream."""
    console = terminal(to_errors=True)
    if not console.is_terminal:
        yield _TrialLines(console)
        return
    # Drawn by us alone: a thread that draws would be forked with the trials.
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda sweep: live.update(Group(_trial_table(candidates, sweep.rows), _status(sweep)), refresh=True)


class _TrialLines:
    """Prints a line for each trial that ended since the last call."""

    def __init__(self, console: Console) -> None:
        self.console, self.printed = console, dict[str, int]()
        self.first = True

    def __call__(self, sweep: Sweep) -> None:
        for row in sweep.rows:
            record = row.record
            if not record.ended or self.printed.get(row.candidate.name) == record.number:
                continue
            self.printed[row.candidate.name] = record.number
            known = "known: " if self.first else ""
            self.console.print(f"{known}{row.candidate.name}: {_outcome(record)}{_remaining(sweep)}", soft_wrap=True)
        self.first = False


def _remaining(sweep: Sweep) -> str:
    rows, left_s = sweep.rows, sweep.eta_s
    done = f"; {sum(row.record.finished for row in rows)} of {len(rows)}"
    if left_s is None:
        return done
    left = f"{left_s:.0f} s" if left_s < 90 else f"{left_s / 60:.0f} min" if left_s < 5400 else f"{left_s / 3600:.1f} h"
    return f"{done}, about {left} left"


def _status(sweep: Sweep) -> Text:
    doing = f"{sweep.doing}: step {sweep.step} of {sweep.candidate_set.base.training.steps}" if sweep.doing else "looking"
    return Text(f"{doing}{_remaining(sweep)}")


def _outcome(record: TrialRecord) -> str:
    if record.state == "failed":
        return f"failed, {record.kind}: {record.reason}"
    speed = "–" if record.tokens_per_s is None else f"{record.tokens_per_s:,.0f} tokens/s"
    return speed if record.state == "measured" else f"{record.reason}: {speed}"


def show_layouts(
    console: Console, candidates: CandidateSet, rows: Sequence[TrialRow], found: SweepVerdict | None, winner: Path | None
) -> None:
    console.print(_trial_table(candidates, rows))
    for row in rows:
        if row.record.state == "failed":
            labelled(console, f"{row.candidate.name}:", "bold red", f"{row.record.kind}: {row.record.reason}")
    if candidates.left_out:
        labelled(console, "left out", "yellow", "since the engine does not run them here:")
        bullets(console, candidates.left_out)
    if found is None:
        labelled(console, "nothing", "bold red", "was measured to its end")
        return
    console.print(_verdict(candidates, found))
    waiting = sum(not row.record.finished for row in rows)
    if waiting:
        console.print(f"{waiting} of {len(rows)} are still to measure: the same command continues with them")
    if winner is not None:
        console.print(f"The winner is in {winner}: ultrascale train {winner}", soft_wrap=True)


def _verdict(candidates: CandidateSet, found: SweepVerdict) -> str:
    best, first = found.winner.candidate, found.first.candidate
    which = "the planner's first choice" if candidates.ranked else "the plan"
    if best is first:
        return f"Fastest: {best.layout}. It is {which}: no regret."
    if found.regret is None:
        record = found.first.record
        why = f"failed ({record.kind})" if record.reason else "was not measured"
        return f"Fastest: {best.name}, {best.layout}; {which} {why}."
    slower = f"{1 - 1 / (1 + found.regret):.1%}"
    return f"Fastest: {best.name}, {best.layout}. {which.capitalize()} is {slower} slower: its regret."


def _trial_table(candidates: CandidateSet, rows: Sequence[TrialRow]) -> Table:
    job, training = candidates.base.job, candidates.base.training
    title = f"{job.model.name}, {job.sequences} × {job.seq:,} tokens per step, {candidates.base.layout.gpus} processes, "
    figures = ("tokens/s predicted", "measured", "error", f"over {rows[0].candidate.name}", "GiB predicted", "measured")
    grid = table(f"{title}{training.steps} steps", "", "layout", *figures, "state", left=("", "layout", "state"))
    for row in rows:
        grid.add_row(
            row.candidate.name, str(row.candidate.layout), *_trial_cells(row, rows[0].record.tokens_per_s), _state(row.record)
        )
    return grid


def _trial_cells(row: TrialRow, base: float | None) -> tuple[str, ...]:
    from ultrascale.measure.bench_trial import tensors_gib

    predicted, measured, memory = row.candidate.predicted, row.record.tokens_per_s, row.record.tensors_gib
    rate = None if predicted is None else predicted.tokens_per_s
    return (
        "–" if rate is None else f"{rate:,.0f}",
        "–" if measured is None else f"{measured:,.0f}",
        "–" if measured is None or rate is None else f"{rate / measured - 1:+.0%}",
        "–" if measured is None or base is None else f"{measured / base:.2f}×",
        "–" if predicted is None else _gib(tensors_gib(predicted)),
        "–" if memory is None else _gib(memory),
    )


def _gib(value: float) -> str:
    return f"{value:,.2f}" if value >= 1 else f"{value:.4f}"


def _state(record: TrialRecord) -> Text:
    detail = f": {record.kind}" if record.state == "failed" else ""
    return Text(f"{record.state}{detail}", style=TRIAL_STYLES[record.state])


def layouts_json(
    candidates: CandidateSet, rows: Sequence[TrialRow], found: SweepVerdict | None, storage: str, study: str
) -> dict[str, Any]:
    return {
        "storage": storage,
        "study": study,
        "trials": [_trial_json(row) for row in rows],
        "left_out": candidates.left_out,
        "winner": found and found.winner.candidate.name,
        "first": rows[0].candidate.name,
        "regret": found and found.regret,
    }


def _trial_json(row: TrialRow) -> dict[str, Any]:
    from ultrascale.measure.bench_trial import tensors_gib

    e = row.candidate.predicted
    figures = e and {**attributes(e, "tokens_per_s", "step_time_s"), "tensors_gib": tensors_gib(e)}
    return {
        **attributes(row.candidate, "name", "layout"),
        "predicted": figures,
        "trial": None if row.record.number < 0 else row.record,
    }
