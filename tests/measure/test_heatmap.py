"""Nanotron's heat map: how it counts, and how many of its layouts are among our first three."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from row_builders import PUBLISHED

from ultrascale.measure.accuracy.runs import read

RECORD = Path(__file__).resolve().parents[2] / "docs" / "accuracy.md"


@pytest.fixture(scope="module")
def heatmap() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "heatmap.py"
    spec = importlib.util.spec_from_file_location("heatmap", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["heatmap"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("id", "pp", "tokens_per_s", "mfu"),
    [
        # Rows of the sweep's own table: the same model gets 17 % more MFU a token on two stages (the embedding is tied).
        ("nanohm-024", 1, 40_149.94, 0.391781),
        ("nanohm-024", 2, 38_894.51, 0.443241),
        ("nanohm-022", 1, 16_385.25, 0.424921),
        ("nanohm-022", 2, 15_402.13, 0.437736),
        # Nothing tied: no gift.
        ("nanohm-023", 1, 7_290.47, 0.439363),
        ("nanohm-023", 4, 7_289.90, 0.439329),
    ],
)
def test_the_map_credits_a_tied_embedding_twice(heatmap: ModuleType, id: str, pp: int, tokens_per_s: float, mfu: float) -> None:
    model = next(run.job.model for run in read(PUBLISHED)[0] if run.id == id and run.job is not None)
    assert tokens_per_s * heatmap.credited_flops(model, 4096, pp) / 989e12 == pytest.approx(mfu, rel=3e-3)


def test_cells_are_distinguished_by_their_request(heatmap: ModuleType) -> None:
    scores = {(8, 1, 1, 2): 3.0, (8, 1, 1, 1): 2.0, (4, 1, 2, 1): 1.0}
    assert heatmap.place((4, 1, 2, 1), scores) == 3
    assert heatmap.place((4, 1, 2), scores) == 2
    assert heatmap.place((2, 2, 2, 1), scores) is None


def test_a_report_has_the_maps_line_once_and_last_of_its_figures(heatmap: ModuleType) -> None:
    cut = (8, 1, 1, 1)
    found = [heatmap.Cell("cell", cut, rank, rank, cut, rank, cut, 0.0, ()) for rank in (1, 3, 4, None)]
    page = "# Title\n\n| what | figure |\n|---|---|\n| dense rows | 4.8% / 8.1% |\n\n| source | rows |\n"
    once = heatmap.reported(page, found)
    assert heatmap.reported(once, found) == once
    figures = once.split("\n\n")[1].splitlines()
    assert figures[:-1] == page.split("\n\n")[1].splitlines()
    assert figures[-1].endswith("| 2 of 4 |")
    with pytest.raises(SystemExit, match="no table"):
        heatmap.reported("# Title\n", found)


def test_the_best_layouts_of_the_sweep_are_among_our_first_three(heatmap: ModuleType) -> None:
    cells = heatmap.cells(PUBLISHED)
    assert len(cells) == 12
    assert sum((one.printed_rank or 99) <= 3 for one in cells) >= 11
    (documented,) = [line for line in RECORD.read_text(encoding="utf-8").splitlines() if line.startswith(heatmap.LINE)]
    assert documented.removeprefix(heatmap.LINE).strip(" |") == f"{heatmap.near(cells, 'printed_rank')} of {len(cells)}"
    assert sum((one.fastest_rank or 99) <= 3 for one in cells) >= 11
    assert max(one.regret for one in cells) < 0.04
    errors = [abs(error) for one in cells for error in one.errors]
    assert len(errors) == 151
    assert sum(errors) / len(errors) < 0.045
