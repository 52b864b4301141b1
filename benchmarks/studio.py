"""How long the studio takes to answer: `python benchmarks/studio.py` (needs the extras studio and dev, and a Chromium).

Starts the studio, changes one control at a time in a headless browser, and prints the seconds from the change to the new first
row of the table, as closed forms rank it and as it is simulated, or from a slider's move to the new verdict.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from studio_browser import studio_browser

QUESTIONS = (
    "model=llama-3-8b&gpu=h100&nodes=8",
    "model=llama-3-70b&gpu=h100&nodes=32",
    "model=llama-3.1-405b&gpu=h100&nodes=128&batch=16M",
)
ROW = "document.querySelector('.us-layouts tbody tr')?.innerText"
VERDICT = "document.body.innerText.match(/^.*: It (fits|does not fit).*$/m)?.[0]"


def changed_s(page: Any, watched: str, change: Callable[[], object]) -> float:
    """Seconds until what the page shows there is another."""
    before = page.evaluate(watched)
    start = time.perf_counter()
    change()
    page.wait_for_function(f"before => {watched} !== before", arg=before, polling=10)
    return time.perf_counter() - start


def answered_s(page: Any, change: Callable[[], object]) -> str:
    """Seconds until the first row is another, and until it is simulated: once, where no other came before that."""
    before = page.evaluate(ROW)
    start = time.perf_counter()
    change()
    row = page.wait_for_function(f"before => {ROW} !== before && {ROW}", arg=before, polling=10).json_value()
    ranked = simulated = time.perf_counter() - start
    if "≈" in row:
        page.wait_for_function(f"!{ROW}.includes('≈')", polling=10)
        simulated = time.perf_counter() - start
    return f"{ranked:.2f} / {simulated:.2f}"


def main() -> None:
    table = Table(title="seconds from a change to the answer on the page: ranked / simulated")
    for heading in ("asked", "sequence 8k → 4k", "fix pp=4", "slider: mbs"):
        table.add_column(heading, justify="left" if heading == "asked" else "right")
    with studio_browser() as (address, browser):
        for question in QUESTIONS:
            page = browser.new_page(viewport={"width": 1280, "height": 1000})
            page.goto(f"{address}/?{question}")
            page.wait_for_selector(".us-layouts tr.selected", timeout=120_000)
            page.wait_for_selector(".main-svg")
            time.sleep(2)
            seq = answered_s(page, partial(page.get_by_label("Sequence (tokens)").fill, "4k"))
            time.sleep(2)
            fix = answered_s(page, partial(page.get_by_label("Fix, such as tp=8,zero=1").fill, "pp=4"))
            time.sleep(2)
            slider = page.get_by_role("slider", name="mbs").locator("[tabindex='0']")
            slider.focus()
            moved = changed_s(page, VERDICT, partial(slider.press, "ArrowRight"))
            table.add_row(question.replace("&", " "), seq, fix, f"{moved:.2f}")
            page.close()
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
