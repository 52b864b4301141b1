"""Launchers: what they say, that no name breaks out of them, and that they start a training."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from plan_builders import exported, plan_of, planned

import ultrascale
from ultrascale.export import targets
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.plan import Plan

HOSTILE = "a b; touch broken $(touch broken) `touch broken` ' \" \\ #"


def two_ranks() -> Plan:
    """A layout of two CPU processes that trains in seconds."""
    job = Job(
        model=Model.load("tiny"),
        cluster=Cluster.load("2xcpu"),
        seq=128,
        batch_tokens=2048,
        precision="fp32",
        framework=Framework.load("ultrascale-eager"),
    )
    return planned(job, Layout(tp=2, mbs=8, gas=2))


def named(plan: Plan, name: str) -> Plan:
    model = plan.job.model.model_copy(update={"name": name})
    return plan.model_copy(update={"job": plan.job.changed(model=model)})


def test_slurm_requests_one_task_per_gpu(tmp_path: Path) -> None:
    script = (exported(plan_of("sharded"), "slurm", tmp_path) / "job.sbatch").read_text()
    options = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert {"--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--job-name=llama-3-1-8b"} <= set(options)
    assert {"--cpus-per-task=8", "--signal=USR1@120", "--requeue"} <= set(options)
    assert Plan.load(tmp_path / "plan.yaml").layout == plan_of("sharded").layout


def test_torchrun_has_a_rendezvous_endpoint_on_several_nodes(tmp_path: Path) -> None:
    many = (exported(plan_of("sharded"), "torchrun", tmp_path / "many") / "torchrun.sh").read_text()
    assert '--nnodes 2 --rdzv-id llama-3-1-8b --rdzv-backend c10d --rdzv-endpoint "${MASTER_ADDR:?' in many
    one = (exported(plan_of("tied"), "torchrun", tmp_path / "one") / "torchrun.sh").read_text()
    assert "--standalone --nproc-per-node 8" in one


def test_kubernetes_files_contain_the_plan_and_its_size(tmp_path: Path) -> None:
    plan = plan_of("sharded")
    folder = exported(plan, "kubernetes", tmp_path)
    for file, kind in (("trainjob.yaml", "TrainJob"), ("jobset.yaml", "JobSet")):
        config, job = yaml.safe_load_all((folder / file).read_text())
        assert (config["kind"], job["kind"]) == ("ConfigMap", kind)
        inside = Plan.from_mapping(yaml.safe_load(config["data"]["plan.yaml"]))
        assert (inside.job, inside.layout) == (plan.job, plan.layout)
    train = yaml.safe_load_all((folder / "trainjob.yaml").read_text())
    trainer = list(train)[1]["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": "8"}, "requests": {"cpu": "64"}}


# From the CRDs: trainer.kubeflow.org_trainjobs.yaml (v2.3) and jobset.x-k8s.io_jobsets.yaml, the fields that are used.
FIELDS = {
    "TrainJob": {
        "": {"apiVersion", "kind", "metadata", "spec"},
        "spec": {"runtimeRef", "trainer", "runtimePatches", "initializer", "suspend", "managedBy", "activeDeadlineSeconds"},
        "spec.runtimeRef": {"apiGroup", "kind", "name"},
        "spec.trainer": {"args", "command", "env", "image", "numNodes", "numProcPerNode", "resourcesPerNode"},
        "spec.runtimePatches": {"manager", "time", "trainingRuntimeSpec"},
    },
    "JobSet": {
        "": {"apiVersion", "kind", "metadata", "spec"},
        "spec": {"network", "replicatedJobs", "failurePolicy", "successPolicy", "suspend", "coordinator", "managedBy"},
        "spec.network": {"enableDNSHostnames", "publishNotReadyAddresses", "subdomain"},
        "spec.replicatedJobs": {"name", "replicas", "template", "dependsOn", "groupName"},
    },
}


@pytest.mark.parametrize(("file", "kind"), [("trainjob.yaml", "TrainJob"), ("jobset.yaml", "JobSet")])
def test_kubernetes_files_use_fields_that_exist(file: str, kind: str, tmp_path: Path) -> None:
    _, data = yaml.safe_load_all((exported(plan_of("sharded"), "kubernetes", tmp_path) / file).read_text())
    for path, known in FIELDS[kind].items():
        place = data
        for key in filter(None, path.split(".")):
            place = place[key]
            place = place[0] if isinstance(place, list) else place
        assert set(place) <= known, path


def test_a_hostile_name_is_quoted(tmp_path: Path) -> None:
    plan = named(plan_of("dense"), HOSTILE)
    for to in targets.LAUNCHERS:
        folder = exported(plan, to, tmp_path / to)
        for file in folder.iterdir():
            if file.name != "plan.yaml" and file.suffix in (".sh", ".sbatch"):
                assert "touch broken" not in file.read_text().replace("a-b-touch", "")
                assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0
        assert Plan.load(folder / "plan.yaml").job.model.name == HOSTILE
    _, job = yaml.safe_load_all((tmp_path / "kubernetes" / "jobset.yaml").read_text())
    assert job["metadata"]["name"].replace("-", "").isalnum()
    assert len(job["metadata"]["name"]) <= 52


@pytest.mark.parametrize("to", [*targets.LAUNCHERS, *targets.ENGINES])
def test_the_next_command_quotes_the_folder(to: str, tmp_path: Path) -> None:
    plan, folder = plan_of("dense"), f"out {HOSTILE}"
    if to in targets.LAUNCHERS:
        _, follows = targets.launcher_files(plan, to, "image:1", folder)
    else:
        follows = targets.engine_files(plan, to, None, folder).next_command
    words = shlex.split(follows.replace("#", "") if to == "kubernetes" else follows)
    assert any(word.replace("#", "").startswith(folder.replace("#", "")) or word.endswith(folder) for word in words)


def environment(**more: str) -> dict[str, str]:
    source = str(Path(ultrascale.__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, **more}


def trained(folder: Path) -> int:
    lines = (folder / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    return int(json.loads(lines[-1])["step"])


@pytest.mark.slow
def test_the_torchrun_script_trains_in_a_folder_of_any_name(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    folder = exported(two_ranks(), "torchrun", tmp_path / "a b; c")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", str(folder / "torchrun.sh"), "train.steps=2", "train.data=synthetic"]
    done = subprocess.run(command, env=environment(PATH=path), capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert trained(folder) == 2


SLURM = """ClusterName=loop
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={other}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A controller and a node of its own, on loopback; the environment that reaches them."""
    missing = [name for name in ("sbatch", "slurmctld", "slurmd", "munged") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"{missing[0]} is not installed" if missing else "slurmd needs root")
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two tasks need two cores")
    folder = tmp_path / "slurm"
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(parents=True)
    (folder / "munge").chmod(0o700)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    port = 20000 + os.getpid() % 20000
    host = os.uname().nodename.split(".")[0]
    (folder / "slurm.conf").write_text(SLURM.format(folder=folder, host=host, port=port, other=port + 1))
    munge = folder / "munge"
    keys = [f"--{name}-file={munge}/{name}" for name in ("key", "pid", "log", "seed")]
    try:
        start(["munged", "--force", f"--socket={munge}/socket", *keys])
        start(["slurmctld", "-f", str(folder / "slurm.conf")])
        start(["slurmd", "-f", str(folder / "slurm.conf")])
        yield environment(SLURM_CONF=str(folder / "slurm.conf"))
    finally:
        for file in (folder / "slurmd.pid", folder / "slurmctld.pid", munge / "pid"):
            if file.exists():
                os.kill(int(file.read_text()), signal.SIGTERM)


def start(command: list[str]) -> None:
    """A daemon that goes into the background by itself."""
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    time.sleep(1)


@pytest.mark.slow
def test_the_batch_script_trains_under_slurm(slurm: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    folder = exported(two_ranks(), "slurm", tmp_path / "a b; c")
    command = ["sbatch", "--wait", "job.sbatch", "train.steps=2", "train.data=synthetic"]
    done = subprocess.run(command, cwd=folder, env=slurm, capture_output=True, text=True, timeout=170, check=False)
    output = "".join(file.read_text() for file in folder.glob("tiny-*.out"))
    assert done.returncode == 0, done.stderr + output[-2000:]
    assert trained(folder) == 2
    assert json.loads((folder / "runs" / "tiny" / "env.json").read_text())["processes"] == 2
