"""Take the studio's two pictures for README and docs: the planner page in light and dark, in a headless Chromium.

python tools/draw_studio.py [-o docs/pictures]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from studio_browser import studio_browser

QUESTION = "model=llama-3-70b&nodes=32&batch=4M&fix=pp%3D4"
WIDTH, HEIGHT = 1440, 1240


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path, default=Path(__file__).parents[1] / "docs" / "pictures")
    out = parser.parse_args().out
    with studio_browser() as (address, browser):
        for theme in ("light", "dark"):
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
            page.goto(f"{address}/?{QUESTION}&theme={theme}")
            page.wait_for_selector(".us-reasons li >> nth=5", timeout=300_000)
            page.wait_for_selector("#sensitivity .main-svg", timeout=300_000)
            time.sleep(2)
            end = page.evaluate("document.getElementById('cluster-map').getBoundingClientRect().bottom")
            page.set_viewport_size({"width": WIDTH, "height": int(end) + 40})
            time.sleep(1)
            page.screenshot(path=out / f"studio-{theme}.png")
            page.close()


if __name__ == "__main__":
    main()
