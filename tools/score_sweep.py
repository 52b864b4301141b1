"""Score the playbook's sweep with constants that were fitted on half of its jobs, and with constants of other sources alone.

python tools/score_sweep.py playbook_sweep.csv [--splits 4]

A job is a model on a number of GPUs with a batch; its layouts fall into the same half. The constants of the sweep
(measure/accuracy/network_state.py and nanotron's launches) are fitted on one half by Gauss-Newton on the logarithm of the step
time, rows that are off by more than 15 % weighing less, and the other half is scored; then the halves change places. Errors are
|predicted / measured − 1| of the step time, in the mean over runs.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from ultrascale.cost.estimate import estimate
from ultrascale.cost.legality import problem
from ultrascale.measure.accuracy.network_state import NETWORK_STATE, NetworkState
from ultrascale.measure.accuracy.runs import MeasuredRun, read
from ultrascale.measure.accuracy.scores import adjusted, left_out_multipliers, measured_rate
from ultrascale.specs.framework import Framework

NAMES = (
    "call_s",
    "blocking_send_s",
    "network_call_s",
    "launch",
)  # fitted: two of the network's state, two of the engine's host
STEP = 0.15  # of the logarithm of a constant, for derivatives
LARGE_ERROR = 0.15
NONE_FOUND_HERE = NetworkState(call_s=0.0, blocking_send_s=1e-4, least_rate=0.0)
NO_SOURCE = "huggingface/nanotron"  # what was fitted to published runs without nanotron's


def multiplied(factors: Sequence[float]) -> NetworkState:
    return replace(
        NETWORK_STATE,
        call_s=NETWORK_STATE.call_s * factors[0],
        blocking_send_s=NETWORK_STATE.blocking_send_s * factors[1],
    )


def log_step(factors: Sequence[float], run: MeasuredRun) -> float:
    """Of a run that was read with the same factors."""
    assert run.job is not None
    assert run.layout is not None
    job, constants = run.job, run.job.cluster.efficiency
    healthy = constants.network_call_s - constants.link_call_s
    constants = constants.model_copy(update={"network_call_s": constants.link_call_s + healthy * factors[2]})
    framework = job.framework.model_copy(update={"launch": job.framework.launch * factors[3]})
    cluster = job.cluster.model_copy(update={"efficiency": constants})
    return math.log(estimate(job.model_copy(update={"cluster": cluster, "framework": framework}), run.layout).step_time_s)


def log_step_of_other_sources(run: MeasuredRun) -> float:
    assert run.job is not None
    assert run.layout is not None
    job = adjusted(run.job, left_out_multipliers()[NO_SOURCE])
    constants = job.cluster.efficiency.model_copy(update={"network_call_s": 0.0})
    plain = Framework.load("eager")
    framework = job.framework.model_copy(update={"launch": plain.launch, "launch_tensor": plain.launch_tensor})
    cluster = job.cluster.model_copy(update={"efficiency": constants})
    return math.log(estimate(job.model_copy(update={"cluster": cluster, "framework": framework}), run.layout).step_time_s)


def predict(pool: ProcessPoolExecutor, file: Path, logs: np.ndarray) -> np.ndarray:
    factors = tuple(map(float, np.exp(logs)))
    return np.asarray(list(pool.map(partial(log_step, factors), timed_runs(file, multiplied(factors)), chunksize=16)))


def timed_runs(file: Path, state: NetworkState = NETWORK_STATE) -> list[MeasuredRun]:
    runs = [run for run in read(file, state)[0] if measured_rate(run)]
    return [run for run in runs if run.job is not None and run.layout is not None and problem(run.job, run.layout) is None]


def log_measured(run: MeasuredRun) -> float:
    assert run.job is not None
    assert run.layout is not None
    return math.log(run.layout.batch_tokens(run.job.seq) / run.layout.gpus / (measured_rate(run) or 1.0))


def fit(jacobian: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """Logarithms of factors, by least squares that are reweighted until they are robust."""
    logs = np.zeros(len(NAMES))
    for _ in range(20):
        weight = 1 / np.maximum(1, np.abs(residual - jacobian @ logs) / LARGE_ERROR)
        left = (jacobian.T * weight) @ jacobian + 1e-9 * np.eye(len(NAMES))
        logs = np.linalg.solve(left, (jacobian.T * weight) @ residual)
    return np.clip(logs, -1, 1)


def halves(jobs: Sequence[tuple[object, ...]], seed: int) -> np.ndarray:
    """Which rows are of the first half of the jobs."""
    distinct = sorted(set(jobs), key=str)
    first = set(random.Random(seed).sample(distinct, len(distinct) // 2))
    return np.asarray([job in first for job in jobs])


def error(predicted: np.ndarray, measured: np.ndarray) -> float:
    return float(np.mean(np.abs(np.exp(predicted - measured) - 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--splits", type=int, default=4)
    arguments = parser.parse_args()
    runs = timed_runs(arguments.sweep)
    measured = np.asarray([log_measured(run) for run in runs])
    jobs = [(run.job.model.name, run.job.cluster.gpus, run.job.batch_tokens) for run in runs if run.job is not None]
    with ProcessPoolExecutor(max_workers=2) as pool:
        others = np.asarray(
            list(pool.map(log_step_of_other_sources, timed_runs(arguments.sweep, NONE_FOUND_HERE), chunksize=16))
        )
        print(f"{len(runs)} runs of {len(set(jobs))} jobs; constants of other sources: {error(others, measured):.1%}")
        start = predict(pool, arguments.sweep, np.zeros(len(NAMES)))
        print(f"constants in use, found on all of them: {error(start, measured):.1%}")
        moved = [predict(pool, arguments.sweep, STEP * unit) for unit in np.eye(len(NAMES))]
        jacobian = np.stack([(each - start) / STEP for each in moved], axis=1)
        scores = []
        for split in range(arguments.splits):
            first = halves(jobs, split)
            for fitted in (first, ~first):
                logs = fit(jacobian[fitted], (measured - start)[fitted])
                predicted = predict(pool, arguments.sweep, logs)
                here, there = error(predicted[fitted], measured[fitted]), error(predicted[~fitted], measured[~fitted])
                scores.append(there)
                factors = ", ".join(f"{name} × {value:.2f}" for name, value in zip(NAMES, np.exp(logs), strict=True))
                sizes = f"{fitted.sum()} fitted {here:.1%}, {(~fitted).sum()} others {there:.1%}"
                print(f"split {split + 1}: {sizes}; {factors}", flush=True)
    print(f"halves not fitted: {np.mean(scores):.1%} in the mean, {max(scores):.1%} at worst")


if __name__ == "__main__":
    main()
