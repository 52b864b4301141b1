"""torchrun: a script that starts our engine on this node, and the same on each of several."""

from __future__ import annotations

from ultrascale.export.common import File, quoted
from ultrascale.specs.plan import Plan

PORT = 29500


def files(plan: Plan, run: str) -> tuple[tuple[File, ...], str]:
    """The script, and how to start it."""
    cluster = plan.job.cluster
    many = cluster.nodes > 1
    meeting = (
        f"--nnodes {cluster.nodes} --rdzv-id {quoted(run)} --rdzv-backend c10d "
        f'--rdzv-endpoint "${{MASTER_ADDR:?the first node}}:{PORT}"'
        if many
        else "--standalone"
    )
    where = (
        f"Run it on each of the {cluster.nodes} nodes, with MASTER_ADDR naming the first." if many else "Run it on the node."
    )
    text = f"""#!/usr/bin/env bash
# {plan.layout}: {cluster.nodes} node(s) of {cluster.gpus_per_node}.
# {where} Words after it change the run: train.steps=1000 train.data=…
set -euo pipefail
cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")"
exec torchrun {meeting} --nproc-per-node {cluster.gpus_per_node} \\
  -m ultrascale train plan.yaml --out runs/{quoted(run)} "$@"
"""
    return (File("torchrun.sh", text),), "MASTER_ADDR=node0 bash {folder}/torchrun.sh" if many else "bash {folder}/torchrun.sh"
