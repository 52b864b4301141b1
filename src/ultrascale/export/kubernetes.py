"""Kubernetes: a Kubeflow Trainer TrainJob, and a plain JobSet for clusters without it; one pod a node, torchrun in it.

The plan travels as a ConfigMap in the same file. Runs are kept on a volume claim that every pod reaches.
"""

from __future__ import annotations

from typing import Any

from ultrascale.export.common import File, name_of
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import to_yaml
from ultrascale.specs.plan import HEADER, Plan

CLAIM = "runs"
PORT = 29500
LARGEST_PLAN = 900_000  # a ConfigMap holds 1 MiB
_POD = "node"  # the replicated job and the container of the runtime torch-distributed


def files(plan: Plan, run: str, image: str) -> tuple[tuple[File, ...], str]:
    if not image.strip() or any(sign.isspace() for sign in image):
        raise SpecError(f"--image is '{image:.60}' but must name a container image, such as registry.example/ultrascale:1")
    name = f"ultrascale-{name_of(run)}"
    text = HEADER + to_yaml({**plan.to_mapping(), "rejected": []})
    if len(text.encode()) > LARGEST_PLAN:
        raise SpecError(f"the plan has {len(text):,} characters, too many for a ConfigMap: plan with fewer pipeline stages")
    plan_map = _config_map(f"{name}-plan", text)
    head = f"# {plan.layout}: {plan.job.cluster.nodes} pod(s) of {plan.job.cluster.gpus_per_node}.\n"
    head += f"# {image} must hold ultrascale; the volume claim '{CLAIM}' must exist and be writable by every pod.\n"
    made = {"trainjob.yaml": _train_job(plan, name, image, run), "jobset.yaml": _job_set(plan, name, image, run)}
    return (
        tuple(File(file, f"{head}{plan_map}---\n{to_yaml(data)}") for file, data in made.items()),
        "kubectl apply -f {folder}/trainjob.yaml   # or jobset.yaml, where there is no Kubeflow Trainer",
    )


def _config_map(name: str, plan: str) -> str:
    """By hand: the plan stays readable as a block."""
    lines = "".join(f"    {line}\n" if line else "\n" for line in plan.splitlines())
    return f"apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {name}\ndata:\n  plan.yaml: |\n{lines}"


def _train(run: str) -> list[str]:
    return ["-m", "ultrascale", "train", "/plan/plan.yaml", "--out", f"/runs/{run}"]


def _train_job(plan: Plan, name: str, image: str, run: str) -> dict[str, Any]:
    cluster = plan.job.cluster
    trainer: dict[str, Any] = {
        "image": image,
        "numNodes": cluster.nodes,
        "numProcPerNode": cluster.gpus_per_node,
        "command": ["torchrun"],  # nodes, ranks and addresses come from the runtime's PET_ variables
        "args": _train(run),
    }
    if resources := _resources(cluster):
        trainer["resourcesPerNode"] = resources
    pod = {"volumes": _volumes(name), "containers": [{"name": _POD, "volumeMounts": _mounts()}]}
    patched = {"replicatedJobs": [{"name": _POD, "template": {"spec": {"template": {"spec": pod}}}}]}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": "torch-distributed"},
            "trainer": trainer,
            "runtimePatches": [
                {"manager": "ultrascale.dev/export", "trainingRuntimeSpec": {"template": {"spec": patched}}},
            ],
        },
    }


def _job_set(plan: Plan, name: str, image: str, run: str) -> dict[str, Any]:
    cluster = plan.job.cluster
    meeting = ["--nnodes", str(cluster.nodes), "--nproc-per-node", str(cluster.gpus_per_node)]
    if cluster.nodes > 1:
        # Pods of a JobSet are called <set>-<job>-<number of the job>-<number of the pod>.<set>.
        first = f"{name}-{_POD}-0-0.{name}"
        meeting += ["--node-rank", "$(NODE_RANK)", "--master-addr", first, "--master-port", str(PORT)]
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    container: dict[str, Any] = {
        "name": _POD,
        "image": image,
        "command": ["torchrun"],
        "args": [*meeting, *_train(run)],
        "env": [{"name": "NODE_RANK", "valueFrom": index}],
        "ports": [{"containerPort": PORT, "protocol": "TCP"}],
        "volumeMounts": _mounts(),
    }
    if resources := _resources(cluster):
        container["resources"] = resources
    pod = {"restartPolicy": "Never", "containers": [container], "volumes": _volumes(name)}
    job = {
        "parallelism": cluster.nodes,
        "completions": cluster.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True},
            "replicatedJobs": [{"name": _POD, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _resources(cluster: Cluster) -> dict[str, Any]:
    kind = cluster.gpu.name
    if kind == "cpu":
        return {}
    resource = "amd.com/gpu" if kind.startswith("mi") else "nvidia.com/gpu"
    return {"limits": {resource: str(cluster.gpus_per_node)}}


def _volumes(name: str) -> list[dict[str, Any]]:
    return [
        {"name": "plan", "configMap": {"name": f"{name}-plan"}},
        {"name": "runs", "persistentVolumeClaim": {"claimName": CLAIM}},
        # NCCL and the data loader share memory beyond the 64 MiB that a pod has.
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]


def _mounts() -> list[dict[str, Any]]:
    return [
        {"name": "plan", "mountPath": "/plan", "readOnly": True},
        {"name": "runs", "mountPath": "/runs"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
