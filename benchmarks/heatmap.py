"""Nanotron's heat map: is the layout that a sweep of thousands of runs found best among our first three?

python benchmarks/heatmap.py [data/published.csv] [--report docs/accuracy.md]

Each cell is a model size on a number of GPUs; the sweep tried data, tensor and pipeline parallelism, ZeRO 0 and 1 and
micro-batches, with 1F1B and no recomputation, so the search is held to those. The map prints the run of the highest MFU, with
(6·parameters + 12·layers·seq·hidden) FLOPs a token and the parameters of all stages summed: a tied embedding sits on the first
and on the last stage and counts twice where pp > 1, up to 17 % more MFU for the same speed. So our candidates are ranked by
that count for the printed layout, and by speed for the fastest run of each cell (benchmarks/nanotron_sweep.csv: the fastest
runs of these cells in the sweep's own table, bench_final2_mfu2.csv as stored in eyao600/Rapid-LLM @d6e2fc37). `--report` puts
the count into the table of figures of a page that `ultrascale accuracy --report` wrote before (`make accuracy` does both).
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ultrascale import Layout, Model, estimate, plan
from ultrascale.measure.accuracy.runs import MeasuredRun, read

HERE = Path(__file__).parent
FIXED = ("schedule=1f1b", "recompute=none")
FORBIDDEN = ("cp", "keep_gathered", "zero_shards", "zero=2", "zero=3")
NEAR = 3  # places of our ranking in which the sweep's best is looked for
FIGURES = "| what | figure |"
LINE = "| nanotron's heat map: printed layouts among our first three (`python benchmarks/heatmap.py`) |"
Cut = tuple[int, int, int, int]


@dataclass(frozen=True)
class Cell:
    name: str
    printed: Cut
    printed_rank: int | None
    degrees_rank: int | None
    """of the printed dp, tp and pp by speed, whatever the micro-batch"""
    fastest: Cut
    fastest_rank: int | None
    first: Cut
    regret: float
    """how much slower the measured run that we think fastest is than the fastest"""
    errors: tuple[float, ...]
    """predicted over measured speed, less one, of every run of the sweep that is known in this cell"""


def cut(layout: Layout) -> Cut:
    return layout.dp, layout.tp, layout.pp, layout.mbs


def credited_flops(model: Model, seq: int, pp: int) -> float:
    """FLOPs that the map credits a token with."""
    twice = model.vocab * model.hidden if pp > 1 and model.tied_embeddings else 0
    return 6 * (model.parameters + twice) + 12 * model.layers * seq * model.hidden


def place(wanted: tuple[int, ...], scores: dict[Cut, float]) -> int | None:
    """Its rank among our candidates, which are distinguished by the degrees that it names."""
    order = list(dict.fromkeys(one[: len(wanted)] for one in sorted(scores, key=lambda one: -scores[one])))
    return order.index(wanted) + 1 if wanted in order else None


def cell(run: MeasuredRun, sweep: list[dict[str, str]]) -> Cell:
    assert run.job is not None
    assert run.layout is not None
    model, seq = run.job.model, run.job.seq
    speed: dict[Cut, float] = {}
    for one in plan(run.job, top=400, explain=False, fix=FIXED, forbid=FORBIDDEN).plans:
        speed[cut(one.layout)] = max(speed.get(cut(one.layout), 0.0), one.estimate.tokens_per_s_per_gpu)
    by_map = {key: value * credited_flops(model, seq, key[2]) for key, value in speed.items()}
    runs = []
    for row in sweep:
        if row["model"] != model.name or int(row["gpus"]) != run.job.cluster.gpus:
            continue
        dp, tp, pp, mbs, zero = (int(row[name]) for name in ("dp", "tp", "pp", "mbs", "zero"))
        layout = run.layout.changed(
            dp=dp, tp=tp, pp=pp, mbs=mbs, zero=zero, gas=run.layout.gas * run.layout.mbs * run.layout.dp // (dp * mbs)
        )
        runs.append((float(row["tokens_per_s_per_gpu"]), estimate(run.job, layout).tokens_per_s_per_gpu, cut(layout)))
    best, (our_rate, *_) = max(runs), max(runs, key=lambda one: one[1])
    return Cell(
        f"{model.name}, {run.job.cluster.gpus} GPUs",
        cut(run.layout),
        place(cut(run.layout), by_map),
        place(cut(run.layout)[:3], speed),
        best[2],
        place(best[2], speed),
        max(speed, key=lambda one: speed[one]),
        best[0] / our_rate - 1,
        tuple(predicted / measured - 1 for measured, predicted, _ in runs),
    )


def cells(path: Path) -> list[Cell]:
    with (HERE / "nanotron_sweep.csv").open(encoding="utf-8") as file:
        sweep = list(csv.DictReader(file))
    return [cell(run, sweep) for run in read(path)[0] if run.system == "nanotron v0.5" and run.job and run.layout]


def near(found: list[Cell], rank: str) -> int:
    """Cells whose layout of that kind is among our first."""
    return sum((getattr(one, rank) or NEAR + 1) <= NEAR for one in found)


def reported(page: str, found: list[Cell]) -> str:
    """The page with the map's line at the end of its table of figures, in place of an older one."""
    lines = [one for one in page.splitlines() if not one.startswith(LINE)]
    if FIGURES not in lines:
        raise SystemExit(f"the report has no table `{FIGURES}`: write it first with ultrascale accuracy --report")
    start = lines.index(FIGURES)
    end = next((at for at in range(start, len(lines)) if not lines[at].startswith("|")), len(lines))
    lines.insert(end, f"{LINE} {near(found, 'printed_rank')} of {len(found)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?", default=HERE.parent / "data" / "published.csv")
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    found = cells(arguments.runs)
    table = Table(title="Best layouts of the sweep (dp, tp, pp, mbs) in our ranking", title_justify="left")
    for name in ("cell", "printed", "our rank", "fastest", "our rank", "our first", "regret"):
        table.add_column(name)
    for one in found:
        ranks = (str(one.printed_rank or "–"), str(one.fastest_rank or "–"))
        table.add_row(one.name, str(one.printed), ranks[0], str(one.fastest), ranks[1], str(one.first), f"{one.regret:.1%}")
    console = Console(width=140)
    console.print(table)
    printed, degrees, fastest = (near(found, rank) for rank in ("printed_rank", "degrees_rank", "fastest_rank"))
    console.print(f"among our first three, of {len(found)} cells:")
    console.print(f"  {printed} printed layouts, by the map's MFU; {degrees} of their dp·tp·pp by speed alone")
    console.print(f"  {fastest} fastest layouts, by speed")
    errors = [error for one in found for error in one.errors]
    console.print(f"{len(errors)} runs of the sweep: {sum(map(abs, errors)) / len(errors):.1%} mean error in tokens/s")
    if arguments.report is not None:
        arguments.report.write_text(reported(arguments.report.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
