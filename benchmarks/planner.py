"""The planner's figures: `make bench`, or `python benchmarks/planner.py [--install]`.

Prints one table: what was asked of the planner, what this machine reached. `--install` also makes a new virtual environment
with the base package alone and weighs it (needs the package index).
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ultrascale import Cluster, Job, Layout, Model, plan
from ultrascale.cost.estimate import estimate
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.table import SearchTable
from ultrascale.cost.timeline import memory_timeline, simulated
from ultrascale.plan.candidates import LayoutConstraints, cores
from ultrascale.schedules import StageTimes
from ultrascale.schedules import build as build_schedule
from ultrascale.schedules import simulate as simulate_schedule
from ultrascale.specs.units import GIB

ROOT = Path(__file__).resolve().parent.parent


def best_of(runs: int, work: object) -> float:
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        work()  # type: ignore[operator]
        times.append(time.perf_counter() - started)
    return min(times)


def job(model: str, cluster: str, batch_tokens: int, seq: int) -> Job:
    return Job(model=Model.load(model), cluster=Cluster.load(cluster), seq=seq, batch_tokens=batch_tokens)


def layouts_per_second(one: Job) -> tuple[int, float]:
    """Enumerating, checking, and memory of every legal layout, time of every one that fits; one process, one core."""
    machine, capacity = ClusterRates(one), one.cluster.gpu.memory_gib * GIB
    layouts = 0

    def work() -> None:
        nonlocal layouts
        tables = (SearchTable(one, g.columns, g.variants, machine).evaluate(capacity) for g in cores(one, LayoutConstraints()))
        layouts = sum(int(cells.legal.sum()) for cells in tables)

    seconds = best_of(3, work)
    return layouts, seconds


def installed_megabytes() -> float:
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "venv"
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--constraint", ROOT / "constraints.txt", ROOT], check=True)
        names = {path.name.lower() for path in (environment / "lib").glob("python*/site-packages/*")}
        if "torch" in names:
            raise SystemExit("the base install pulled torch in")
        return sum(path.stat().st_size for path in environment.rglob("*") if path.is_file() and not path.is_symlink()) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="weigh a new virtual environment with the base package")
    arguments = parser.parse_args()
    figures = Table(title=f"Planner on {platform.machine()}, Python {platform.python_version()}", title_justify="left")
    for column in ("what", "reached", "wanted"):
        figures.add_column(column)

    dense = job("llama-3-70b", "64xh100", 2**22, 8192)
    for name, one in (
        ("llama-3-70b on 64 H100", dense),
        ("llama-3-405b on 16,384 H100", job("llama-3-405b", "16384xh100", 2**24, 8192)),
        ("qwen3-235b-a22b on 256 H100", job("qwen3-235b-a22b", "256xh100", 2**23, 4096)),
    ):
        layouts, seconds = layouts_per_second(one)
        figures.add_row(f"layouts a second, {name}", f"{layouts / seconds:,.0f} ({layouts:,} in {seconds:.2f} s)", "≥ 50,000")

    large = job("llama-3-405b", "16384xh100", 2**24, 8192)
    figures.add_row("whole search, llama-3-405b on 16,384 H100", f"{best_of(3, lambda: plan(large)):.2f} s", "< 3 s")

    small = job("llama-3-70b", "32xh100", 16 * 8192, 8192)
    layout = Layout(tp=8, pp=4, mbs=1, gas=16)

    def simulate() -> None:
        estimate(small, layout)
        simulated(small, layout)
        memory_timeline(small, layout, 0)

    figures.add_row("simulate llama-3-70b TP8·PP4, 16 micro-batches, with timeline", f"{best_of(3, simulate):.3f} s", "< 1 s")
    schedule = build_schedule("interleaved", 16, 128, 8)
    times = StageTimes.uniform(schedule.stages, 1.0, 1.0, 1.0, 0.01)
    alone = best_of(3, lambda: simulate_schedule(schedule, times))
    figures.add_row("simulate interleaved, 16 ranks · 8 stages each, 128 micro-batches", f"{alone:.2f} s", "< 0.5 s")
    helping = best_of(
        5, lambda: subprocess.run([sys.executable, "-m", "ultrascale", "--help"], check=True, capture_output=True)
    )
    figures.add_row("ultrascale --help", f"{helping:.2f} s", "< 0.6 s")
    counts = sum(model.parameters for model in Model.presets().values())
    figures.add_row(f"parameters of all {len(Model.presets())} presets (exact: tests/specs)", f"{counts:,}", "exact")
    if arguments.install:
        figures.add_row("base install, new virtual environment", f"{installed_megabytes():.0f} MB, no torch", "< 140 MB")
    Console(width=140).print(figures)


if __name__ == "__main__":
    main()
