"""Launchers: job files that start our engine, or another from its exported files, on every node of a cluster.

A program is a script that starts the processes of one node. Each launcher (launchers.yaml, templates/) sets the variables that
the script reads, NODE_RANK and MASTER_ADDR, and runs it on all nodes. Kubernetes: a Kubeflow Trainer TrainJob, and a plain
JobSet for clusters without it; the files travel as a ConfigMap, and runs are kept on a volume claim that every pod reaches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from ultrascale.export.common import EngineFormat, File, name_of, quoted
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import package_data, to_yaml
from ultrascale.specs.plan import HEADER, Plan
from ultrascale.specs.validate import shown

CLAIM = "runs"
PORT = 29500
LARGEST_PLAN = 900_000  # a ConfigMap holds 1 MiB
LONGEST_NAME = 40  # dstack takes 41 letters, a JobSet with its pods' names 52
_POD = "node"  # the replicated job and the container of the runtime torch-distributed
_WORD = re.compile(r"<([a-z_]+)>")
_JOB = "/job"  # where containers find the files


@cache
def table() -> dict[str, dict[str, Any]]:
    """launchers.yaml by name."""
    return dict(package_data("ultrascale.export", "launchers.yaml")["launchers"])


@dataclass(frozen=True)
class NodeProgram:
    """What a launcher starts on each node."""

    files: tuple[File, ...]
    script: File
    """starts the processes of one node"""
    run: str
    """the job's name, of letters, digits and dashes"""
    needs: str
    """what must be installed where it runs"""
    image: str
    own: bool
    """our engine, which takes ranks from Slurm and arguments of a run"""

    @property
    def named(self) -> str:
        return f"ultrascale-{self.run}"[:LONGEST_NAME].rstrip("-")


def own_program(plan: Plan) -> NodeProgram:
    run, cluster = name_of(plan.job.model.name), plan.job.cluster
    many = cluster.nodes > 1
    where = (
        f"Run it on each of the {cluster.nodes} nodes, with MASTER_ADDR naming the first." if many else "Run it on the node."
    )
    rendezvous = (
        f"--nnodes {cluster.nodes} --rdzv-id {quoted(run)} --rdzv-backend c10d "
        f'--rdzv-endpoint "${{MASTER_ADDR:?the first node}}:{PORT}"'
        if many
        else "--standalone"
    )
    start = (
        f"torchrun {rendezvous} --nproc-per-node {cluster.gpus_per_node} \\\n"
        f"  -m ultrascale train plan.yaml --out runs/{quoted(run)}"
    )
    script = _fill_template("torchrun.sh", {**_shape(plan), "where": where, "start": start})
    whole = File("plan.yaml", HEADER + to_yaml(plan.to_mapping()))
    needs = "ultrascale must be installed there, with its extra `train`."
    return NodeProgram((whole,), File("torchrun.sh", script), run, needs, "ultrascale:latest", own=True)


def engine_program(plan: Plan, engine: EngineFormat, files: Sequence[File]) -> NodeProgram:
    cluster = plan.job.cluster
    torchrun = (
        f"torchrun --nnodes {cluster.nodes} --nproc-per-node {cluster.gpus_per_node} \\\n"
        '  --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \\\n '
    )
    machine = '--machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" '
    start = engine.start.format(torchrun=torchrun, machine=machine if cluster.nodes > 1 else "", folder='"$HERE"')
    where = "Run it on each of them, with NODE_RANK and MASTER_ADDR." if cluster.nodes > 1 else "Run it there."
    words = {**_shape(plan), "title": engine.title, "where": where, "needs": engine.needs, "port": PORT, "start": start}
    script = File("node.sh", _fill_template("node.sh", words))
    run = name_of(f"{plan.job.model.name}-{engine.name}")
    return NodeProgram(tuple(files), script, run, engine.needs, f"{engine.name}:latest", own=False)


def launcher_files(plan: Plan, program: NodeProgram, launcher: str, image: str | None) -> tuple[list[File], str]:
    """All files of a job, and the command that starts it, of the quoted folder."""
    spec = table()[launcher]
    image = program.image if image is None else image
    if not image.isascii() or not image.isprintable() or " " in image or '"' in image or not image:
        raise SpecError(f"--image is {shown(image)} but must name a container image, such as registry.example/ultrascale:1")
    words = _words(plan, program, spec, image)
    written = [File(name.removesuffix(".txt"), _fill_template(name, words)) for name in spec["templates"]]
    if launcher == "kubernetes":
        written = _kubernetes_files(plan, program, words)
    needs_script = not program.own or launcher not in ("slurm", "kubernetes")  # those start our processes themselves
    files = [*program.files, *([program.script] if needs_script else []), *written]
    many = plan.job.cluster.nodes > 1 and launcher == "torchrun"
    follows = ("MASTER_ADDR=node0 " if many else "") + spec["next"].replace("{script}", program.script.name)
    return files, follows


def _shape(plan: Plan) -> dict[str, Any]:
    cluster = plan.job.cluster
    return {"layout": str(plan.layout), "nodes": cluster.nodes, "each": cluster.gpus_per_node}


def _words(plan: Plan, program: NodeProgram, spec: Mapping[str, Any], image: str) -> dict[str, Any]:
    """The words of every template; a line with a word that is None is left out."""
    cluster = plan.job.cluster
    each, kind = cluster.gpus_per_node, cluster.gpu.name
    gpus = None if kind == "cpu" else each
    per_gpu = 1 if kind == "cpu" else package_data("ultrascale.export", "launchers.yaml")["cpus_per_gpu"]
    return {
        **_shape(plan),
        "run": program.run,
        "name": program.named,
        "needs": program.needs,
        "script": program.script.name,
        "image": image,
        "port": PORT,
        "gpus": gpus,
        "gpu_count": gpus or 0,
        "accelerator": spec.get("accelerators", {}).get(kind, kind.upper()),
        "cpus": per_gpu * each,
        **(_own_slurm(program.run, each, per_gpu) if program.own else _engine_slurm(program.script.name, each, per_gpu)),
    }


def _own_slurm(run: str, each: int, per_gpu: int) -> dict[str, Any]:
    """One task per GPU; ranks and addresses come from Slurm's variables (launch/rank_info.py)."""
    return {
        "tasks": each,
        "cpus_per_task": per_gpu,
        "signal": "--signal=USR1@120",
        "requeue": "--requeue",
        "example": "train.steps=1000",
        "slurm_master": None,
        "on_signal": "USR1 makes the run save itself two minutes before its time is over; a requeued job resumes.",
        "slurm_start": 'srun --kill-on-bad-exit=1 "${PYTHON:-python}" -m ultrascale train plan.yaml '
        f'--out runs/{quoted(run)} "$@"',
    }


def _engine_slurm(script: str, each: int, per_gpu: int) -> dict[str, Any]:
    """One task per node, which starts its processes."""
    return {
        "tasks": 1,
        "cpus_per_task": per_gpu * each,
        "signal": None,
        "requeue": None,
        "example": "",
        "slurm_master": 'export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)" '
        "MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))",
        "on_signal": None,
        "slurm_start": f'srun --kill-on-bad-exit=1 bash -c \'NODE_RANK=$SLURM_NODEID exec bash {script} "$@"\' {script} "$@"',
    }


def _fill_template(template: str, words: Mapping[str, Any]) -> str:
    text = resources.files("ultrascale.export").joinpath("templates", template).read_text(encoding="utf-8")
    lines = (line for line in text.splitlines() if not any(words[word] is None for word in _WORD.findall(line)))
    return "".join(f"{_WORD.sub(lambda word: str(words[word[1]]), line)}".rstrip() + "\n" for line in lines)


def _kubernetes_files(plan: Plan, program: NodeProgram, words: Mapping[str, Any]) -> list[File]:
    whole = File("plan.yaml", HEADER + to_yaml({**plan.to_mapping(), "rejected": []}))
    files = (whole,) if program.own else (*program.files, program.script)
    if sum(len(file.text.encode()) for file in files) > LARGEST_PLAN:
        raise SpecError(
            f"the plan has {len(whole.text):,} characters, too many for a ConfigMap: plan with fewer pipeline stages"
        )
    head = f"# {plan.layout}: {plan.job.cluster.nodes} pod(s) of {plan.job.cluster.gpus_per_node}.\n# {program.needs}\n"
    head += f"# The volume claim '{CLAIM}' must exist and be writable by every pod.\n"
    config_map = _config_map(f"{program.named}-job", files)
    return [
        File(name, f"{head}{config_map}---\n{to_yaml(data)}") for name, data in _manifests(plan, program, words, files).items()
    ]


def _config_map(name: str, files: Sequence[File]) -> str:
    """By hand: the files stay readable as blocks."""
    head = f"apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {name}\ndata:\n"
    return head + "".join(f"  {_key(file)}: |\n{_indented(file.text)}" for file in files)


def _key(file: File) -> str:
    return file.name.replace("/", ".")


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" if line else "\n" for line in text.splitlines())


def _manifests(plan: Plan, program: NodeProgram, words: Mapping[str, Any], files: Sequence[File]) -> dict[str, Any]:
    """kubernetes.yaml with the words of this job."""
    nodes, each, kind = words["nodes"], words["each"], plan.job.cluster.gpu.name
    # Pods of a JobSet are called <set>-<job>-<number of the job>-<number of the pod>.<set>.
    first = f"{program.named}-{_POD}-0-0.{program.named}"
    rendezvous = ["--nnodes", str(nodes), "--nproc-per-node", str(each)]
    if nodes > 1:
        rendezvous += ["--node-rank", "$(NODE_RANK)", "--master-addr", first, "--master-port", str(PORT)]
    vendor = "amd.com/gpu" if kind.startswith("mi") else "nvidia.com/gpu"
    gpus = {} if kind == "cpu" else {"limits": {vendor: str(each)}}
    train = ["-m", "ultrascale", "train", f"{_JOB}/plan.yaml", "--out", f"/runs/{program.run}"]
    more = {
        "claim": CLAIM,
        "pod": _POD,
        "first_pod": first if nodes > 1 else "localhost",
        "items": None if program.own else [{"key": _key(file), "path": file.name} for file in files],
        "command": ["torchrun"] if program.own else ["bash"],
        "args": train if program.own else [f"{_JOB}/{program.script.name}"],
        "rendezvous": rendezvous if program.own else [],
        "resources": {**gpus, "requests": {"cpu": str(words["cpus"])}},
    }
    data = package_data("ultrascale.export", "templates/kubernetes.yaml")
    return {file: _substitute(data[file], {**words, **more}) for file in ("trainjob.yaml", "jobset.yaml")}


def _substitute(node: Any, words: Mapping[str, Any]) -> Any:
    if isinstance(node, dict):
        substituted = {key: _substitute(value, words) for key, value in node.items()}
        return {key: value for key, value in substituted.items() if value is not None}
    if isinstance(node, list):
        parts = [_substitute(one, words) for one in node]
        return [one for part in parts for one in (part if isinstance(part, list) else [part])]
    if not isinstance(node, str):
        return node
    whole = _WORD.fullmatch(node)
    return words[whole[1]] if whole else _WORD.sub(lambda word: str(words[word[1]]), node)
