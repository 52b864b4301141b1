"""How long the studio takes to answer: `python benchmarks/studio.py` (needs the extras studio and dev, and a Chromium).

Starts the studio, changes one control at a time in a headless browser, and prints the seconds from the change to the new first
row of the table, as closed forms rank it and as it is simulated, or from a slider's move to the new verdict. Before that: the
seconds until the accuracy page is open, by its link on the first page, as soon as that is drawn, and by its address in a
browser that has read nothing of the studio yet.
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

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tools"))
from studio_browser import studio_browser  # noqa: E402

QUESTIONS = (
    "model=llama-3-8b&gpu=h100&nodes=8",
    "model=llama-3-70b&gpu=h100&nodes=32",
    "model=llama-3.1-405b&gpu=h100&nodes=128&batch=16M",
)
VIEWPORT = {"width": 1280, "height": 1000}
ROW = "document.querySelector('.us-layouts tbody tr')?.innerText"
ACCURACY = {
    "numbers": "/\\d+ runs: tokens/.test(document.body?.innerText)",
    "points": "document.querySelectorAll('#scatter .scatterlayer .point').length > 0",
    "all rows": "!document.body?.innerText.includes('so far')",
}
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


def opened_s(page: Any, visit: Callable[[], object]) -> str:
    """Seconds until the accuracy page has its numbers, the points of its figure, and all rows."""
    start, found = time.perf_counter(), []
    visit()
    for condition in ACCURACY.values():
        page.wait_for_function(condition, polling=10, timeout=120_000)
        found.append(f"{time.perf_counter() - start:.2f}")
    return " / ".join(found)


def main() -> None:
    table = Table(title="seconds from a change to the answer on the page: ranked / simulated")
    for heading in ("asked", "sequence 8k → 4k", "fix pp=4", "slider: mbs"):
        table.add_column(heading, justify="left" if heading == "asked" else "right")
    opened = Table(title="accuracy page, seconds: " + " / ".join(ACCURACY))
    for heading in ("by its link", "again", "by its address"):
        opened.add_column(heading, justify="right")
    with studio_browser("--accuracy", str(ROOT / "data" / "published.csv")) as (address, browser):
        visits, page = [], browser.new_page(viewport=VIEWPORT)
        for _ in range(2):
            page.goto(address)
            page.wait_for_selector(".main-svg", timeout=120_000)
            visits.append(opened_s(page, partial(page.get_by_role("link", name="Accuracy").click, no_wait_after=True)))
        page.close()
        page = browser.new_page(viewport=VIEWPORT)  # a context of its own: no cache
        visits.append(opened_s(page, partial(page.goto, f"{address}/accuracy", wait_until="commit")))
        page.close()
        opened.add_row(*visits)
        for question in QUESTIONS:
            page = browser.new_page(viewport=VIEWPORT)
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
    Console(width=120).print(opened, table)


if __name__ == "__main__":
    main()
