"""How well six runs predict twenty others: `python benchmarks/calibration.py [data/calibration/h200.jsonl] [--draws 24]`.

Reads runs as benchmarks/gpu/calibration_runs.py gathers them, calibrates on those it marked for that, and prints every run
beside what was predicted before, with what `ultrascale bench hardware` measures in ten seconds, and after. `--draws` asks how
much is owed to which six they are: so many others are drawn, two from each third of the runs in the order of how long a layer
was predicted to take the GPU, so that none is drawn by how its prediction turned out. No GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

from rich.console import Console
from rich.table import Table

from ultrascale.cost.estimate import estimate
from ultrascale.measure.calibrate import Calibration, calibrate, measured_peak, peak_bytes
from ultrascale.measure.calibrate_fit import InitialConstants, StepTimeModel, fit
from ultrascale.measure.calibrate_runs import CalibrationRun, load
from ultrascale.show.calibrate import summary

DATA = Path(__file__).resolve().parent.parent / "data" / "calibration" / "h200.jsonl"
SEED = 20  # as of the runs themselves
UNSTEADY = 0.05  # half of what the middle half of a run's own steps differ by: no constant predicts such a run closer


@dataclass(frozen=True)
class Predicted:
    """One run beside its predictions; errors are predicted over measured, less one."""

    run: CalibrationRun
    fitted: bool
    before: float
    after: float
    memory_before: float
    memory_after: float
    waits: float
    """share of the step that the GPU waits for the host, as predicted after"""

    @property
    def steady(self) -> bool:
        return self.run.spread < UNSTEADY


def report(path: Path) -> tuple[Calibration, list[Predicted]]:
    """The calibration on the runs to fit, and every run with it."""
    uses = {line["run"]: line["use"] for line in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
    runs = load([path])
    six = [run for run in runs if uses[run.name] == "fit"]
    found = calibrate(six)
    base = InitialConstants.of(max(six, key=lambda run: run.layout.gpus).job)
    return found, [_predicted(base, found, run, uses[run.name] == "fit") for run in runs]


def _predicted(base: InitialConstants, found: Calibration, run: CalibrationRun, fitted: bool) -> Predicted:
    old, new = base.cluster.efficiency, found.cluster.efficiency
    before, after = (estimate(base.job(run.job, each), run.layout) for each in (old, new))
    peak = measured_peak(base, run)
    assert peak is not None  # a run's folder has it
    peaks = [peak_bytes(peak, each) / peak.measured - 1 for each in (old, new)]
    times = [one.step_time_s / run.step_s - 1 for one in (before, after)]
    waits = 0.0 if new.synchronous else after.time.launch_s / after.step_time_s  # a CPU is its own host
    return Predicted(run, fitted, times[0], times[1], peaks[0], peaks[1], waits)


@dataclass(frozen=True)
class Draw:
    """One choice of six, and the runs that it left to judge by."""

    fitted: tuple[str, ...]
    off: dict[str, float]
    """predicted over measured, less one"""

    @property
    def within(self) -> int:
        return sum(abs(one) <= 0.05 for one in self.off.values())


def drawn(path: Path, draws: int) -> list[Draw]:
    runs, rng = load([path]), random.Random(SEED)
    base = InitialConstants.of(max(runs, key=lambda run: run.layout.gpus).job)
    model = StepTimeModel(base, runs)
    order = sorted(range(len(runs)), key=lambda index: _layer_s(base, runs[index]))
    ends = [round(third * len(runs) / 3) for third in range(4)]
    found = []
    for _ in range(draws):
        six = [index for start, end in pairwise(ends) for index in rng.sample(order[start:end], 2)]
        predicted = model.logs(fit(model, six).moves, range(len(runs)))
        others = (index for index in range(len(runs)) if index not in six)
        off = {runs[index].name: math.exp(predicted[index]) / runs[index].step_s - 1 for index in others}
        found.append(Draw(tuple(runs[index].name for index in six), off))
    return found


def _layer_s(base: InitialConstants, run: CalibrationRun) -> float:
    """What the GPU was predicted to need for one layer of a micro-batch: the less, the more it waits for the host."""
    expected = estimate(base.job(run.job, base.cluster.efficiency), run.layout)
    return (expected.step_time_s - expected.time.launch_s) / (run.job.model.layers * run.layout.gas)


def about_draws(draws: list[Draw]) -> list[str]:
    errors = [mean(map(abs, draw.off.values())) for draw in draws]
    names = {name for draw in draws for name in draw.off}
    of_run = {name: [draw.off[name] for draw in draws if name in draw.off] for name in names}
    farthest = sorted(names, key=lambda name: -abs(median(of_run[name])))[:4]
    return [
        f"{len(draws)} draws of six: the others off by {median(errors):.1%} in the middle draw ({min(errors):.1%} to "
        f"{max(errors):.1%}), {median(draw.within for draw in draws):.0f} of them within 5 % "
        f"({min(draw.within for draw in draws)} to {max(draw.within for draw in draws)})",
        "farthest off, whichever six were drawn: " + ", ".join(f"{name} {median(of_run[name]):+.1%}" for name in farthest),
    ]


def show(path: Path, draws: int) -> None:
    console = Console(width=150)
    found, rows = report(path)
    table = Table(title=f"{found.base.label}: predicted over measured, less one", title_justify="left")
    for name in ("run", "", "step ms", "before", "after", "peak before", "after", "waits for the host"):
        table.add_column(name, justify="left" if name in ("run", "") else "right")
    for row in rows:
        step = f"{row.run.step_s * 1e3:.1f}{'' if row.steady else f' ±{row.run.spread:.0%}'}"
        errors = (f"{one:+.1%}" for one in (row.before, row.after, row.memory_before, row.memory_after))
        table.add_row(row.run.name, "fitted" if row.fitted else "", step, *errors, f"{row.waits:.0%}")
    console.print(table)
    for line in summary(found):
        console.print(f"of the {len(found.runs)} fitted: {line}")
    for line in verdict(rows) + (about_draws(drawn(path, draws)) if draws else []):
        console.print(line)


def verdict(rows: list[Predicted]) -> list[str]:
    others = [row for row in rows if not row.fitted]
    lines = []
    for words, some in (
        (f"the {len(others)} others", others),
        ("of these, with steady steps that the GPU sets", [row for row in others if row.steady and row.waits < 0.05]),
        (
            "of these, with steps that the host sets or that wander by more than 5 %",
            [row for row in others if not row.steady or row.waits >= 0.05],
        ),
    ):
        if some:
            before, after = ([abs(getattr(row, when)) for row in some] for when in ("before", "after"))
            errors = [abs(row.memory_after) for row in some]
            lines.append(
                f"{words} ({len(some)}): step time off by {mean(before):.1%} before and {mean(after):.1%} after, worst "
                f"{max(before):.1%} and {max(after):.1%}, {sum(one <= 0.05 for one in after)} within 5 %, "
                f"{sum(one <= 0.15 for one in after)} within 15 %; peak memory {mean(errors):.1%}, worst {max(errors):.1%}, "
                f"{sum(one <= 0.02 for one in errors)} within 2 %"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?", default=DATA)
    parser.add_argument("--draws", type=int, default=0, help="so many other choices of six, some seconds each")
    options = parser.parse_args()
    show(options.runs, options.draws)


if __name__ == "__main__":
    main()
