"""Planning starts fast: no heavy import before a command runs, never torch, and imports between packages run one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ultrascale

ROOT = Path(ultrascale.__file__).parent
# What each room may import of the others: schedules ← specs ← cost ← plan, and
# specs ← model ← kernels ← parallel ← train ← launch; measure, the renderers and the command line are on top.
# A file beside the rooms is a room of its own.
ALLOWED = {
    "schedules": {"schedules", "specs.errors"},
    "specs": {"specs", "schedules"},
    "cost": {"cost", "schedules", "specs"},
    "plan": {"plan", "cost", "schedules", "specs"},
    "export": {"export", "plan", "cost", "schedules", "specs"},
    "data": {"data", "specs"},
    "model": {"model", "specs"},
    "kernels": {"kernels", "model", "cost", "schedules", "specs"},
    "parallel": {"parallel", "kernels", "model", "schedules", "specs"},
    "train": {"train", "data", "parallel", "kernels", "model", "cost", "schedules", "specs"},
    "launch": {"launch", "train", "data", "parallel", "kernels", "model", "cost", "specs"},
    "measure": {
        "measure",
        "export",
        "figures.style",
        "generate",
        "launch",
        "train",
        "data",
        "parallel",
        "kernels",
        "model",
        "plan",
        "cost",
        "schedules",
        "specs",
        "__version__",
    },
    "figures": {"figures", "measure", "plan", "cost", "schedules", "specs"},
    "show": {"show", "measure", "export", "launch", "train", "plan", "cost", "specs", "__version__"},
    "report": {"report", "figures", "show", "measure", "plan", "cost", "specs", "__version__"},
    "studio": {"studio", "report", "figures", "show", "export", "measure", "plan", "cost", "schedules", "specs"},
    "convert.py": {"train", "data", "model", "cost", "specs"},
    "generate.py": {"train", "data", "model", "specs"},
    "__init__.py": {"launch", "plan", "cost", "specs"},
    "__main__.py": {"cli"},
}
ON_TOP = {"cli"}


def loaded_after(code: str, *arguments: str) -> set[str]:
    report = f"{code}\nimport sys; print('\\n' + '\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", report, *arguments], capture_output=True, text=True, check=True)
    return {line.split(".")[0] for line in done.stdout.splitlines()}


HELP = """
import sys
from ultrascale.cli import main
try:
    main()
except SystemExit as end:
    assert end.code == 0
"""


def test_help_imports_nothing_heavy() -> None:
    found = loaded_after(HELP, "--help")
    assert "typer" in found
    assert not found & {"torch", "numpy", "pydantic", "yaml"}


@pytest.mark.parametrize("arguments", [["--version"], ["plan", "-h"], ["explain", "-h"], ["quickstart", "-h"]])
def test_help_of_a_command_imports_no_numerics(arguments: list[str]) -> None:
    """typer itself loads pydantic as soon as it reads a verb's options; nothing of ours does."""
    found = loaded_after(HELP, *arguments)
    assert not found & {"torch", "numpy", "yaml"}


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert not loaded_after("import ultrascale") & {"torch", "numpy", "pydantic", "yaml", "rich"}


def test_planning_never_imports_torch() -> None:
    code = (
        "from ultrascale import *\n"
        "job = Job(model=Model.load('gpt2'), cluster=Cluster.load('1xh100'), seq=1024, batch_tokens=1024)\n"
        "plan(job, top=1)\nimport ultrascale.plan.what_if, ultrascale.show.explain"
    )
    found = loaded_after(code)
    assert "numpy" in found
    assert "torch" not in found


def test_a_run_is_refused_before_torch_is_loaded() -> None:
    code = (
        "import sys; sys.argv = ['ultrascale', 'train', '--model', 'tiny', 'layout.tp=3']\n"
        "from ultrascale.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 2"
    )
    assert "torch" not in loaded_after(code)


def imported(file: Path) -> set[str]:
    """Every module that a file's import statements name, those inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("file", sorted(ROOT.rglob("*.py")), ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_run_one_way(file: Path) -> None:
    room = file.relative_to(ROOT).parts[0]
    if room in ON_TOP:
        return
    assert room in ALLOWED, f"say in ALLOWED what {room} may import"
    for name in imported(file):
        if room in ("specs", "schedules", "cost", "plan", "export", "data"):
            assert name.split(".")[0] != "torch", f"{file} imports {name}"
        if room == "model":
            assert not name.startswith("torch.distributed"), f"{file} imports {name}: the model stays plain"
        inside = name.removeprefix("ultrascale.")
        if name.startswith("ultrascale."):
            assert any(f"{inside}.".startswith(f"{allowed}.") for allowed in ALLOWED[room]), f"{file} imports {name}"


def test_all_public_names_exist() -> None:
    for name in ultrascale.__all__:
        assert getattr(ultrascale, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        ultrascale.plam  # noqa: B018
