"""Plans of 40 jobs for our engine (8 models on 5 clusters): the fullest rank of each is rehearsed and must fit its GPU.

    python benchmarks/plans_fit.py [--models llama-3-8b,...] [--clusters 8xh100,...] [--json OUT.JSON]

A job whose model does not fit a cluster at all counts when `plan` says so and names a change that makes it fit.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from ultrascale.measure import rehearse
from ultrascale.plan import plan
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.job import Job
from ultrascale.specs.model import Model

MODELS = (
    *("smollm2-1.7b", "llama-3.2-3b", "llama-3-8b", "qwen3-14b"),
    *("qwen3-32b", "llama-3-70b", "mixtral-8x7b", "qwen3-30b-a3b"),
)
CLUSTERS = ("16xh100", "16xa100-80", "64xh100", "256xb200", "512xh200")
SEQ, SEQUENCES = 4096, 1024


def fits(model: str, cluster: str) -> dict[str, Any]:
    job = Job(model=Model.load(model), cluster=Cluster.load(cluster), seq=SEQ, batch_tokens=SEQ * SEQUENCES)
    started = time.perf_counter()
    found = plan(job, top=1, explain=False)
    row: dict[str, Any] = {"model": model, "cluster": cluster}
    if found.no_fit is not None:
        changes = [change.text for change in found.no_fit.changes]
        return {**row, "ok": bool(changes), "layout": "nothing fits", "change": changes[:1]}
    best = found.plans[0]
    stage = str(best.estimate.peak_stage)
    kernels = rehearse.kernels_of(best.job, best.layout, "meta")
    ranks = rehearse.ranks_of(best.layout, None, stage)
    report = rehearse.report(
        best, rehearse.rehearse(best.job, best.layout, ranks, "meta", lambda _: None, kernels), "meta", kernels
    )
    room = report.room
    return {
        **row,
        "layout": str(best.layout),
        "ok": bool(room.fits),
        "predicted_gib": best.estimate.peak_gib,
        "rehearsed_gib": room.needs_gib,
        "capacity_gib": best.estimate.capacity_gib,
        "seconds": time.perf_counter() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for model in options.models.split(","):
        for cluster in options.clusters.split(","):
            rows.append(fits(model, cluster))
            print(json.dumps(rows[-1]), flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(rows, indent=1))
    print(f"{sum(row['ok'] for row in rows)} of {len(rows)}")


if __name__ == "__main__":
    main()
