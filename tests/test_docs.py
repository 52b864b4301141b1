"""What the documents say works: their commands and their Python run."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from ultrascale.cli import app

ROOT = Path(__file__).resolve().parent.parent
SKILLS = sorted((ROOT / "skills").glob("*/SKILL.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *SKILLS]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[str]:
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    return [line for line in lines if line.startswith("ultrascale ")]


def name(page: Path) -> str:
    return page.parent.name if page in SKILLS else page.name


@pytest.mark.quick_cases("README.md", "estimates.md", "export.md", "move-between-engines")
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name)
def test_commands_of_a_page_run_in_their_order(page, tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    for name, text in re.findall(
        r'^```\w+ title="(.*?)"\n(.*?)^```', page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    ):
        (tmp_path / name).write_text(text)
    for command in commands(page):
        code, _, err = run(*shlex.split(command)[1:])
        assert code == 0, f"{command}\n{err}"


@pytest.mark.quick_cases("README.md", "api.md", "memory.md", "time.md")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), {"__name__": "__main__"})


def test_readme_starts_with_the_two_commands():
    first, second, *_ = blocks(ROOT / "README.md", "sh")
    assert first.strip() == "make quickstart"
    assert second.strip() == "make test"
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_links_between_documents_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_skills_say_their_name_and_when_to_use_them():
    assert len(SKILLS) == 6
    for page in SKILLS:
        _, head, body = page.read_text(encoding="utf-8").split("---\n", 2)
        fields = yaml.safe_load(head)
        assert fields["name"] == page.parent.name
        assert "Use " in fields["description"]
        assert len(fields["description"]) < 1024
        assert commands(page)
        verbs = re.findall(r"ultrascale ([a-z]+)", body)
        assert set(verbs) <= {command.name or command.callback.__name__ for command in app.registered_commands} | {"bench"}


def test_the_figures_of_the_readme_are_those_of_the_report():
    report = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    quoted = re.findall(r"\d+\.\d% / \d+\.\d%", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(quoted) == 2
    assert all(f"| {figures} |" in report for figures in quoted)
