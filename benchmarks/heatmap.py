"""Nanotron's heat map: is the layout that a sweep of thousands of runs found best among our first three?

python benchmarks/heatmap.py [data/published.csv]

Each cell is a model size on a number of GPUs; the sweep tried data, tensor and pipeline parallelism, ZeRO 0 and 1 and
micro-batches, with 1F1B and no recomputation, so the search is held to those.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ultrascale import Layout, plan
from ultrascale.measure.runs import read

SWEPT = {"fix": ["schedule=1f1b", "recompute=none"], "forbid": ["cp", "keep_gathered", "zero_shards", "zero=2", "zero=3"]}


def cut(layout: Layout) -> tuple[int, int, int, int]:
    return layout.dp, layout.tp, layout.pp, layout.mbs


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "data" / "published.csv"
    table = Table(title="Best layout of the sweep (dp, tp, pp, mbs) in our ranking", title_justify="left")
    for name in ("cell", "best of the sweep", "our rank", "of its dp, tp, pp", "our first"):
        table.add_column(name)
    cells = hits = hits_of_degrees = 0
    for run in read(path)[0]:
        if run.system != "nanotron v0.5" or run.job is None or run.layout is None:
            continue
        plans = plan(run.job, top=200, explain=False, **SWEPT).plans
        ranked = list(dict.fromkeys(cut(one.layout) for one in plans))
        wanted = cut(run.layout)
        rank = ranked.index(wanted) + 1 if wanted in ranked else None
        degrees = list(dict.fromkeys(layout[:3] for layout in ranked))
        rank_of_degrees = degrees.index(wanted[:3]) + 1 if wanted[:3] in degrees else None
        cells += 1
        hits += rank is not None and rank <= 3
        hits_of_degrees += rank_of_degrees is not None and rank_of_degrees <= 3
        cell = f"{run.job.model.name}, {run.job.cluster.gpus} GPUs"
        table.add_row(cell, str(wanted), str(rank or "–"), str(rank_of_degrees or "–"), str(ranked[0]))
    console = Console(width=120)
    console.print(table)
    console.print(f"among our first three: {hits} of {cells} layouts, {hits_of_degrees} of {cells} dp·tp·pp")


if __name__ == "__main__":
    main()
