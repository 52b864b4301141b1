"""The site of docs/: it builds without a warning, has every page, loads nothing from elsewhere; its pictures are current."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from ultrascale.measure.bench_ladders import LADDERS, planned

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PICTURES = DOCS / "pictures"
TECHNIQUES = sorted((DOCS / "techniques").glob("*.md"))
PLUGINS = ("mkdocs", "material", "mkdocstrings", "griffe_pydantic")
LOADED = re.compile(r"""<(?:script|img|iframe)[^>]*\ssrc="?(?:https?:)?//|<link[^>]*\shref="?(?:https?:)?//""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a fresh build, and the output of mkdocs."""
    missing = [name for name in PLUGINS if find_spec(name) is None]
    if missing:
        pytest.skip(f"the site is built with {', '.join(missing)}: pip install 'ultrascale[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    return folder, output


@pytest.mark.slow
def test_the_site_builds_without_a_warning(site):
    folder, output = site
    assert "WARNING" not in output
    assert "Documentation built" in output
    assert (folder / "index.html").is_file()


def test_every_page_is_in_the_navigation_and_on_the_site(site):
    listed = set(re.findall(r"[\w/.-]+\.md", yaml.safe_dump(_config()["nav"])))
    there = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert listed == there
    built = {page.relative_to(site[0]).with_suffix(".md").as_posix() for page in site[0].rglob("*.html")}
    assert {page.replace("README", "index") for page in there} <= built


def test_pages_load_nothing_from_elsewhere(site):
    for page in site[0].rglob("*.html"):
        assert not LOADED.search(page.read_text(encoding="utf-8")), page.name
    style = "".join(sheet.read_text(encoding="utf-8") for sheet in site[0].rglob("*.css"))
    assert not re.search(r"""url\(["']?(?:https?:)?//|@import""", style)


def test_the_reference_has_every_public_name(site):
    import ultrascale

    reference = (site[0] / "api.html").read_text(encoding="utf-8")
    for name in set(ultrascale.__all__) - {"__version__"}:
        assert re.search(rf'id="ultrascale\.[\w.]+\.{name}"', reference), name
    assert "data parallelism: replicas of the model" in reference, "descriptions of fields are shown"


def test_links_out_of_the_docs_become_code(site):
    page = (site[0] / "kernels" / "index.html").read_text(encoding="utf-8")
    assert "<code>benchmarks/gpu/README.md</code>" in page
    assert 'href="../../benchmarks' not in page


@pytest.mark.slow
def test_pictures_are_those_that_the_code_draws(tmp_path):
    for tool, place in (("draw_docs.py", tmp_path), ("draw_zero.py", tmp_path / "first.svg")):
        ended = subprocess.run(
            [sys.executable, ROOT / "tools" / tool, "-o", place], capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr
    drawn = {file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()}
    kept = {file.name: file.read_text(encoding="utf-8") for file in PICTURES.glob("*.svg")}
    kept["first.svg"] = (ROOT / "docs" / "zero.svg").read_text(encoding="utf-8")
    stale = sorted(name for name in drawn.keys() | kept.keys() if drawn.get(name) != kept.get(name))
    assert not stale, f"{', '.join(stale)}: run tools/draw_docs.py and tools/draw_zero.py, and look at what changed"


def test_the_page_of_settings_is_that_of_the_classes(tmp_path):
    written = tmp_path / "settings.md"
    subprocess.run([sys.executable, ROOT / "tools" / "settings_page.py", "-o", written], check=True)
    assert written.read_text(encoding="utf-8") == (DOCS / "settings.md").read_text(encoding="utf-8"), (
        "docs/settings.md is stale: run python tools/settings_page.py"
    )


def test_every_picture_is_shown():
    text = "".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    for file in PICTURES.iterdir():
        assert f"pictures/{file.name})" in text


@pytest.mark.parametrize("page", [page for page in TECHNIQUES if page.name != "README.md"], ids=lambda page: page.stem)
def test_a_technique_has_its_parts(page):
    text = page.read_text(encoding="utf-8")
    heads = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert {"Idea", "Law", "Picture", "What it costs"} <= set(heads)
    for file in re.findall(r"`((?:cost|parallel|train|schedules|specs|model|plan)/[\w/]+\.py)`", text):
        assert (ROOT / "src" / "ultrascale" / file).is_file(), f"{page.name} names {file}"


@pytest.mark.parametrize("name", LADDERS)
def test_each_ladder_has_its_place_and_its_rungs(name):
    climbs = re.compile(rf"`ultrascale bench ladders --only [\w,]*\b{name}\b[\w,]*`")
    pages = [text for text in (page.read_text(encoding="utf-8") for page in TECHNIQUES) if climbs.search(text)]
    assert len(pages) == 1
    for rung in planned(name, 2):
        assert f"**{rung.name}**" in pages[0]


def _config():
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
