"""Launchers of our own engine: a torchrun script, a Slurm batch script, and Kubernetes jobs.

Kubernetes: a Kubeflow Trainer TrainJob, and a plain JobSet for clusters without it; one pod a node, torchrun in it. The plan
travels as a ConfigMap in the same file. Runs are kept on a volume claim that every pod reaches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ultrascale.export.common import File, name_of, quoted
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import package_data, to_yaml
from ultrascale.specs.plan import HEADER, Plan

CLAIM = "runs"
PORT = 29500
LARGEST_PLAN = 900_000  # a ConfigMap holds 1 MiB
_POD = "node"  # the replicated job and the container of the runtime torch-distributed


def torchrun_files(plan: Plan, run: str) -> tuple[tuple[File, ...], str]:
    """A script for one node, or the same for each of several; and how to start it."""
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


def slurm_files(plan: Plan, run: str) -> tuple[tuple[File, ...], str]:
    """A batch script of one task per GPU; ranks and addresses come from Slurm's variables (launch/rank_info.py)."""
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


def kubernetes_files(plan: Plan, run: str, image: str) -> tuple[tuple[File, ...], str]:
    if not image.strip() or any(sign.isspace() for sign in image):
        raise SpecError(f"--image is '{image:.60}' but must name a container image, such as registry.example/ultrascale:1")
    name = f"ultrascale-{name_of(run)}"
    text = HEADER + to_yaml({**plan.to_mapping(), "rejected": []})
    if len(text.encode()) > LARGEST_PLAN:
        raise SpecError(f"the plan has {len(text):,} characters, too many for a ConfigMap: plan with fewer pipeline stages")
    plan_map = _config_map(f"{name}-plan", text)
    head = f"# {plan.layout}: {plan.job.cluster.nodes} pod(s) of {plan.job.cluster.gpus_per_node}.\n"
    head += f"# {image} must hold ultrascale; the volume claim '{CLAIM}' must exist and be writable by every pod.\n"
    manifests = _manifests(plan, name, image, run)
    return (
        tuple(File(file, f"{head}{plan_map}---\n{to_yaml(data)}") for file, data in manifests.items()),
        "kubectl apply -f {folder}/trainjob.yaml   # or jobset.yaml, where there is no Kubeflow Trainer",
    )


def _config_map(name: str, plan: str) -> str:
    """By hand: the plan stays readable as a block."""
    lines = "".join(f"    {line}\n" if line else "\n" for line in plan.splitlines())
    return f"apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {name}\ndata:\n  plan.yaml: |\n{lines}"


def _manifests(plan: Plan, name: str, image: str, run: str) -> dict[str, Any]:
    """kubernetes.yaml with the words of this plan."""
    cluster = plan.job.cluster
    nodes, each, kind = cluster.nodes, cluster.gpus_per_node, cluster.gpu.name
    rendezvous = ["--nnodes", str(nodes), "--nproc-per-node", str(each)]
    if nodes > 1:
        # Pods of a JobSet are called <set>-<job>-<number of the job>-<number of the pod>.<set>.
        first = f"{name}-{_POD}-0-0.{name}"
        rendezvous += ["--node-rank", "$(NODE_RANK)", "--master-addr", first, "--master-port", str(PORT)]
    resource = "amd.com/gpu" if kind.startswith("mi") else "nvidia.com/gpu"
    words = {
        "<name>": name,
        "<name>-plan": f"{name}-plan",
        "<claim>": CLAIM,
        "<pod>": _POD,
        "<image>": image,
        "<nodes>": nodes,
        "<each>": each,
        "<port>": PORT,
        "<train>": ["-m", "ultrascale", "train", "/plan/plan.yaml", "--out", f"/runs/{run}"],
        "<rendezvous>": rendezvous,
        "<resources>": None if kind == "cpu" else {"limits": {resource: str(each)}},
    }
    data = package_data("ultrascale.export", "kubernetes.yaml")
    return {file: _substitute(data[file], words) for file in ("trainjob.yaml", "jobset.yaml")}


def _substitute(node: Any, words: Mapping[str, Any]) -> Any:
    if isinstance(node, dict):
        substituted = {key: _substitute(value, words) for key, value in node.items()}
        return {key: value for key, value in substituted.items() if value is not None}
    if isinstance(node, list):
        parts = [_substitute(one, words) for one in node]
        return [one for part in parts for one in (part if isinstance(part, list) else [part])]
    return words.get(node, node)
