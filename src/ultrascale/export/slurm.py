"""Slurm: a batch script, one task per GPU; ranks and addresses come from Slurm's variables (launch/rank_info.py)."""

from __future__ import annotations

from ultrascale.export.common import File, quoted
from ultrascale.specs.plan import Plan


def files(plan: Plan, run: str) -> tuple[tuple[File, ...], str]:
    cluster = plan.job.cluster
    gpus = "" if cluster.gpu.name == "cpu" else f"#SBATCH --gpus-per-node={cluster.gpus_per_node}\n"
    text = f"""#!/usr/bin/env bash
#SBATCH --job-name={run}
#SBATCH --nodes={cluster.nodes}
#SBATCH --ntasks-per-node={cluster.gpus_per_node}
{gpus}#SBATCH --exclusive
#SBATCH --output=%x-%j.out
#SBATCH --signal=USR1@120
#SBATCH --requeue
# {plan.layout}. Submit it from this folder; partition, account and time limit are yours to add:
#   sbatch --partition=… --time=… job.sbatch train.steps=1000
set -euo pipefail
cd -- "${{SLURM_SUBMIT_DIR:?submit this with sbatch}}"
# USR1 lets the run keep itself two minutes before its time is over; a requeued job goes on from there.
srun --kill-on-bad-exit=1 "${{PYTHON:-python}}" -m ultrascale train plan.yaml --out runs/{quoted(run)} "$@"
"""
    return (File("job.sbatch", text),), "cd {folder} && sbatch job.sbatch"
