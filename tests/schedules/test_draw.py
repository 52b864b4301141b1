"""The text picture, and that the pictures on the documentation page are what the code draws."""

from __future__ import annotations

from pathlib import Path

import pytest

from ultrascale.schedules import build, draw

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"


def test_cells() -> None:
    assert draw(build("1f1b", 2, 2)).splitlines() == [
        "rank 0 |F0 F1 .. .. B0 -- .. B1 --|",
        "rank 1 |.. F0 B0 -- F1 B1 -- .. ..|",
    ]


def test_pairs_and_second_stages() -> None:
    first = draw(build("dualpipe-v", 1, 2, 2)).splitlines()[0]
    assert "f1  +B0 ---" in first


@pytest.mark.parametrize(
    ("name", "virtual_stages"),
    [
        ("afab", 1),
        ("1f1b", 1),
        ("interleaved", 2),
        ("zero-bubble", 1),
        ("zb-v", 2),
        ("dualpipe-v", 2),
        ("v-half", 2),
        ("v-min", 2),
    ],
)
def test_the_page_shows_what_the_code_draws(name: str, virtual_stages: int) -> None:
    assert draw(build(name, 4, 8, virtual_stages)) in PAGE.read_text(encoding="utf-8")
