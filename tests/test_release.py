"""What a release ships: a wheel that plans without torch on every Python here, and metadata that agree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSIONS = [
    line.rpartition(" ")[2] for line in PROJECT["classifiers"] if line.startswith("Programming Language :: Python :: 3.")
]


def test_metadata_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert f">={VERSIONS[0]}" == PROJECT["requires-python"]
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["test.yml", "release.yml"])
def test_workflows_run_what_the_readme_says_on_every_version(name: str) -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))["jobs"]
    versions = [job["strategy"]["matrix"]["python"] for job in jobs.values() if "strategy" in job]
    assert versions == [VERSIONS]
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    if name == "test.yml":
        assert runs == ["make test"]
    else:
        assert jobs["publish"]["permissions"] == {"id-token": "write"}
        assert list(jobs) == ["build", "try", "publish"]
        assert "secrets" not in str(jobs)


def test_the_image_starts_as_a_user_and_copies_what_the_wheel_needs() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("USER ")] == ["USER ultrascale"]
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for path in copied:
        assert (ROOT / path).exists()
        assert f"!{path}" in ignored
    assert {PROJECT["readme"], *PROJECT["license-files"]} <= set(copied)


def interpreter(version: str) -> str | None:
    """This Python, one on the path that starts, or one installed beside this one, as pyenv does."""
    beside = Path(sys.base_prefix).parent.glob(f"{version}.*/bin/python{version}")
    for python in (sys.executable, shutil.which(f"python{version}"), *map(str, beside)):
        command = [python or "false", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        if subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() == version:
            return python
    return None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No matching distribution" in done.stderr or "Could not find a version" in done.stderr:
        pytest.skip("no package index is in reach for the build backend")
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_a_wheel_in_an_empty_environment_plans_without_torch(version: str, wheel: Path, tmp_path: Path) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"python{version} is not installed")
    subprocess.run([python, "-m", "venv", str(tmp_path / "env")], check=True, capture_output=True)
    bin_folder = tmp_path / "env" / "bin"
    installed = subprocess.run(
        [bin_folder / "python", "-m", "pip", "install", "--quiet", wheel], capture_output=True, text=True
    )
    assert installed.returncode == 0, installed.stderr
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def ultrascale(*words: str) -> str:
        command = [bin_folder / "ultrascale", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert PROJECT["version"] in ultrascale("--version")
    assert "llama-3-8b" in ultrascale("presets")
    job = ("--cluster", "8xh100", "--batch-tokens", "512k", "--seq", "4096")
    ultrascale("plan", "llama-3-8b", *job, "--framework", "megatron-core", "-o", "plan.yaml")
    ultrascale("export", "plan.yaml", "--to", "megatron", "--launcher", "kubernetes", "-o", "out")  # templates are in the wheel
    assert "step" in ultrascale("import", "out/run.sh").lower()
    found = subprocess.run([bin_folder / "python", "-c", "import torch"], capture_output=True, check=False)
    assert found.returncode != 0
