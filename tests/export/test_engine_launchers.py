"""Job files for every engine and launcher: they parse, have the fields of their formats, and start the engine's files."""

from __future__ import annotations

import ast
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from plan_builders import plan_of

from ultrascale.export import targets, write
from ultrascale.export.launchers import table

ENGINES = list(targets.ENGINES)
# Fields as SkyPilot 0.14 (sky/utils/schemas.py), dstack 0.22 (TaskConfiguration) and Kubernetes have them.
SKYPILOT = {"name", "workdir", "num_nodes", "resources", "run", "setup", "envs", "file_mounts"}
SKYPILOT_RESOURCES = {"accelerators", "cpus", "memory", "image_id", "infra", "use_spot", "disk_size"}
DSTACK = {"type", "name", "nodes", "image", "files", "commands", "resources", "env", "volumes", "working_dir"}
DSTACK_RESOURCES = {"gpu", "cpu", "memory", "shm_size", "disk"}


@cache
def engine_export(to: str) -> targets.EngineExport:
    return targets.engine_files(plan_of("dense"), to, None, "out")


def job(to: str, launcher: str, folder: Path) -> Path:
    """The folder that `ultrascale export` writes; with --allow-different, so that every engine has one."""
    plan = plan_of("dense")
    if to == "ultrascale":
        files, _ = targets.launcher_files(plan, launcher, None, str(folder))
    else:
        files = targets.with_launcher(engine_export(to), plan, launcher, None, str(folder)).files
    write.into(folder, files, force=False)
    return folder


def script(to: str) -> str:
    return "torchrun.sh" if to == "ultrascale" else "node.sh"


@pytest.mark.parametrize("launcher", targets.LAUNCHERS)
@pytest.mark.parametrize("to", ENGINES)
def test_scripts_are_valid_and_the_engines_files_are_there(to: str, launcher: str, tmp_path: Path) -> None:
    folder = job(to, launcher, tmp_path)
    config = targets.ENGINES[to][-1].config
    assert (folder / config).exists()
    assert config.removesuffix(".py") in (folder / "node.sh").read_text()
    for file in folder.iterdir():
        if file.suffix in (".sh", ".sbatch"):
            assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0
            assert os.access(file, os.X_OK)
        if file.suffix in (".sh", ".sbatch", ".yml", ".yaml") or file.name == "ray_train.py":
            assert not [word for word in ("<nodes>", "<each>", "<script>", "<start>", "<cpus>") if word in file.read_text()]


@pytest.mark.parametrize("to", ENGINES)
def test_the_node_script_runs_the_engine_with_its_rank_and_address(to: str, tmp_path: Path) -> None:
    """With programs that print their arguments in the place of torchrun and accelerate."""
    folder = job(to, "torchrun", tmp_path / "a b; c")
    programs = tmp_path / "bin"
    programs.mkdir()
    for program in ("torchrun", "accelerate"):
        (programs / program).write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        (programs / program).chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "NODE_RANK": "3", "PET_MASTER_ADDR": "first"}
    done = subprocess.run(["bash", folder / "node.sh", "--more"], env=environment, capture_output=True, text=True, check=True)
    words = done.stdout.split("\n")
    rank = words[1 + next(at for at, word in enumerate(words) if word in ("--node-rank", "--machine_rank"))]
    address = words[1 + next(at for at, word in enumerate(words) if word in ("--master-addr", "--main_process_ip"))]
    assert (rank, address) == ("3", "first")
    assert to in ("megatron", "torchtitan") or any(word.startswith(str(folder)) for word in words)
    assert "--more" in words or to == "megatron"


@pytest.mark.parametrize("to", ENGINES)
def test_slurm_starts_one_task_per_node_for_another_engine(to: str, tmp_path: Path) -> None:
    text = (job(to, "slurm", tmp_path) / "job.sbatch").read_text()
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=8", "--ntasks-per-node=1", "--cpus-per-task=64", "--gpus-per-node=8"} <= set(options)
    assert not any("signal" in option or "requeue" in option for option in options)  # other engines do not know USR1
    assert "bash node.sh" in text


@pytest.mark.parametrize("to", ["ultrascale", *ENGINES])
def test_kubernetes_carries_the_files_of_the_job(to: str, tmp_path: Path) -> None:
    folder = job(to, "kubernetes", tmp_path)
    for file in ("trainjob.yaml", "jobset.yaml"):
        config, data = yaml.safe_load_all((folder / file).read_text())
        pod = str(data)
        assert config["metadata"]["name"] in pod
        if to != "ultrascale":
            assert config["data"]["node.sh"] == (folder / "node.sh").read_text()
            engine = targets.ENGINES[to][-1]
            assert config["data"][engine.config] == (folder / engine.config).read_text()
            assert "/job/node.sh" in pod
        assert "'cpu': '64'" in pod


@pytest.mark.parametrize("to", ["ultrascale", *ENGINES])
def test_skypilot_has_its_fields(to: str, tmp_path: Path) -> None:
    data = yaml.safe_load((job(to, "skypilot", tmp_path) / "skypilot.yaml").read_text())
    assert set(data) <= SKYPILOT
    assert set(data["resources"]) <= SKYPILOT_RESOURCES
    assert (data["num_nodes"], data["resources"]["accelerators"], data["resources"]["cpus"]) == (8, "H100:8", "64+")
    assert f"bash {script(to)}" in data["run"]
    assert "SKYPILOT_NODE_RANK" in data["run"]


@pytest.mark.parametrize("to", ["ultrascale", *ENGINES])
def test_dstack_has_its_fields(to: str, tmp_path: Path) -> None:
    data = yaml.safe_load((job(to, "dstack", tmp_path) / "train.dstack.yml").read_text())
    assert set(data) <= DSTACK
    assert set(data["resources"]) <= DSTACK_RESOURCES
    assert (data["type"], data["nodes"], data["resources"]["gpu"]) == ("task", 8, "H100:8")
    assert data["commands"][-1] == f"bash /job/{script(to)}"


@pytest.mark.parametrize("to", ["ultrascale", *ENGINES])
def test_ray_train_runs_the_script_on_each_node(to: str, tmp_path: Path) -> None:
    text = (job(to, "ray", tmp_path) / "ray_train.py").read_text()
    tree = ast.parse(text)
    constants = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Assign)}
    assert any("= (8, 8, 64)" in line for line in constants)
    assert f"'{script(to)}'" in ast.unparse(tree)


def test_one_node_without_gpus_asks_for_none(tmp_path: Path) -> None:
    from test_launchers import two_ranks

    plan = two_ranks()
    for launcher in targets.LAUNCHERS:
        files, _ = targets.launcher_files(plan, launcher, None, "out")
        texts = "".join(file.text for file in files if file.name != "plan.yaml")
        assert "gpus-per-node" not in texts
        assert "accelerators" not in texts
        assert "nvidia" not in texts
    assert "= 1, 0, 2" in texts


def test_every_gpu_has_a_name_for_clouds() -> None:
    from ultrascale.specs.gpu import GPU

    for launcher in ("skypilot", "dstack"):
        unknown = set(table()[launcher]["accelerators"]) - set(GPU.presets())
        assert not unknown


def test_launchers_are_a_table() -> None:
    def keys(spec: dict[str, Any]) -> set[str]:
        return set(spec) - {"container", "accelerators"}

    assert all(keys(spec) == {"templates", "next"} for spec in table().values())
