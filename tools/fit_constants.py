"""Fit the few constants between data sheets and clocks to measured runs, and leave each source out once.

python tools/fit_constants.py data/published.csv [--rounds 2]

Gauss-Newton on the logarithm of tokens/s, with a prior on every constant (its own figure, give or take `spread`), so that a
constant moves only as far as many runs pull it. Prints what moved; writes, for every source, the multipliers fitted without it
and the residuals of its rows under those (measure/accuracy/left_out.json), from which `ultrascale accuracy` reports
leave-one-source-out errors and every Estimate takes its range. New values for the constants themselves are set by hand, in
cost/hardware.py, specs/efficiency.py and specs/presets/frameworks.yaml, where their sources stand.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ultrascale.cost.estimate import estimate
from ultrascale.cost.hardware import SUSTAINED
from ultrascale.cost.kernels import attention_rates
from ultrascale.cost.legality import problem
from ultrascale.cost.ranges import regime
from ultrascale.measure.accuracy.runs import MeasuredRun, read
from ultrascale.measure.accuracy.scores import adjusted, measured_rate, score, source_group
from ultrascale.specs.efficiency import Efficiency
from ultrascale.specs.framework import Framework

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = ROOT / "src" / "ultrascale" / "measure" / "accuracy" / "left_out.json"
RESIDUALS = ROOT / "src" / "ultrascale" / "cost" / "surfaces" / "residuals.json"
STEP = 0.08  # for the derivative of log tokens/s by the logarithm of a constant
NOISE = 0.07  # same-configuration spread of published runs, doubled: what the model is not asked to explain
# What is fitted: its figure before any fit, from data sheets, papers and the engines' code (docs/time.md), and how far (as a
# share) it may move before that figure speaks as loud as one row.
FITTED: dict[str, tuple[float, float]] = {
    "sustained.ampere.bf16": (1.00, 0.06),
    "sustained.hopper.bf16": (0.95, 0.06),
    "sustained.blackwell.bf16": (0.95, 0.10),
    "sustained.hopper.fp8": (1.00, 0.08),
    "sustained.blackwell.fp8": (1.00, 0.08),
    "elementwise.fsdp1-eager": (2.2, 0.20),
    "elementwise.eager": (2.2, 0.20),
    "elementwise.megatron-core": (1.3, 0.20),
    "elementwise.megatron-2021": (1.8, 0.20),
    "elementwise.nanotron": (2.2, 0.20),
    "attention.flash.ampere": (0.63, 0.08),
    "attention.flash.hopper": (0.66, 0.08),
    "attention.flash.blackwell": (0.55, 0.15),  # assumed, as hopper then
    "attention.flash-1.ampere": (0.38, 0.08),
    "attention.flash-1.hopper": (0.20, 0.08),
    "attention.flash-2.hopper": (0.38, 0.08),
    "memory_bandwidth": (0.80, 0.05),
    "link_bandwidth": (1.00, 0.08),
    "network_bandwidth": (0.82, 0.08),
    "overlap_slowdown": (0.10, 0.25),
}
NAMES = list(FITTED)


def current(name: str) -> float:
    """The figure in use."""
    kind, *rest = name.split(".")
    if kind == "sustained":
        return SUSTAINED[rest[0]][rest[1]]
    if kind == "elementwise":
        return Framework.load(rest[0]).elementwise
    if kind == "attention":
        return attention_rates()[rest[0]][rest[1]].forward
    return 1.0 if kind == "link_bandwidth" else float(getattr(Efficiency(), kind))


def log_rate(theta: tuple[float, ...], run: MeasuredRun) -> float:
    multipliers = {name: math.exp(value) for name, value in zip(NAMES, theta, strict=True)}
    assert run.job is not None
    assert run.layout is not None
    return math.log(estimate(adjusted(run.job, multipliers), run.layout).tokens_per_s_per_gpu)


def predict(pool: ProcessPoolExecutor, theta: np.ndarray, runs: list[MeasuredRun]) -> np.ndarray:
    return np.asarray(list(pool.map(partial(log_rate, tuple(theta)), runs, chunksize=16)))


def weights(runs: list[MeasuredRun]) -> np.ndarray:
    """Releases of one configuration share one vote, and a source's votes grow slower than its rows."""
    configurations = [(source_group(run), str(run.job), str(run.layout)) for run in runs]
    repeats, sizes = Counter(configurations), Counter(source_group(run) for run in runs)
    votes = [1 / repeats[key] / sizes[key[0]] ** 0.4 for key in configurations]
    return np.asarray(votes / np.mean(votes))


def solve(jacobian: np.ndarray, residual: np.ndarray, weight: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """One damped step: robust against rows that are off by more than 15 %, held by the priors."""
    prior = np.asarray([FITTED[name][1] for name in NAMES])
    centre = np.asarray([math.log(FITTED[name][0] / current(name)) for name in NAMES])
    trusted = weight / np.maximum(1, np.abs(residual) / 0.15) / NOISE**2
    left = (jacobian.T * trusted) @ jacobian + np.diag(1 / prior**2)
    right = (jacobian.T * trusted) @ residual - (theta - centre) / prior**2
    return np.clip(np.linalg.solve(left, right), -0.5, 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    everything, _ = read(arguments.runs)
    runs = [run for run in everything if run.job and run.layout and measured_rate(run) and problem(run.job, run.layout) is None]
    dense = [run for run in runs if run.job is not None and run.job.model.moe is None]
    measured = np.asarray([math.log(measured_rate(run) or 1) for run in dense])
    weight, theta = weights(dense), np.zeros(len(NAMES))  # starts from the figures in use
    with ProcessPoolExecutor(max_workers=2) as pool:
        predicted = predict(pool, theta, dense)
        print(f"{len(dense)} dense rows, as set: {np.mean(np.abs(np.exp(predicted - measured) - 1)):.1%} mean error")
        for _ in range(arguments.rounds):
            steps = [predict(pool, theta + STEP * unit, dense) for unit in np.eye(len(NAMES))]
            jacobian = np.stack([(moved - predicted) / STEP for moved in steps], axis=1)
            theta = theta + solve(jacobian, measured - predicted, weight, theta)
            predicted = predict(pool, theta, dense)
            print(f"fitted: {np.mean(np.abs(np.exp(predicted - measured) - 1)):.1%}")
    for name, value in zip(NAMES, theta, strict=True):
        before, now = FITTED[name][0], current(name)
        print(f"  {name:28s} before any fit {before:.2f}, in use {now:.2f}, this fit {now * math.exp(value):.3f}")
    sources = np.asarray([source_group(run) for run in dense])
    left_out: dict[str, dict[str, float]] = {}
    for source in sorted({source_group(run) for run in runs}):
        keep = sources != source
        step = solve(jacobian[keep], (measured - predicted)[keep], weight[keep], theta)
        left_out[source] = {
            name: round(math.exp(value), 4) for name, value in zip(NAMES, theta + step, strict=True) if abs(value) > 5e-4
        }

    def without_its_source(run: MeasuredRun) -> object:
        assert run.job is not None
        return adjusted(run.job, left_out[source_group(run)])

    LEFT_OUT.write_text(json.dumps({"fitted_by": "tools/fit_constants.py", "multipliers": left_out}, indent=1) + "\n")
    residuals: list[dict[str, Any]] = []
    for one in score(runs, without_its_source):  # type: ignore[arg-type]
        if one.ratio is None or one.run.job is None or one.estimate is None:
            continue
        job = one.run.job
        residuals.append(
            {
                "id": one.run.id,
                "source": source_group(one.run),
                "framework": job.framework.name,
                "architecture": job.cluster.gpu.architecture,
                "regime": regime(job, one.estimate.time),
                "log": round(math.log(one.ratio), 4),
            }
        )
    memory = [
        {"id": one.run.id, "source": source_group(one.run), "log": round(-math.log(one.memory_ratio), 4)}
        for one in score(runs)
        if one.memory_ratio is not None
    ]
    written = {"fitted_by": "tools/fit_constants.py, every row without its own source", "time": residuals, "memory": memory}
    RESIDUALS.write_text(json.dumps(written, indent=1) + "\n")
    for label, experts in (("dense", False), ("experts", True)):
        errors = [abs(math.exp(row["log"]) - 1) for row in residuals if (row["regime"] == "experts") is experts]
        if errors:
            print(f"leave one source out, {label}: {np.mean(errors):.1%} mean error over {len(errors)} rows")


if __name__ == "__main__":
    main()
