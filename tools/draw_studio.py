"""Take the studio's two pictures for README and docs: the planner page in light and dark, in a headless Chromium.

python tools/draw_studio.py [-o docs/pictures]
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from playwright.sync_api import sync_playwright

QUESTION = "model=llama-3-70b&nodes=32&batch=4M&fix=pp%3D4"
WIDTH, HEIGHT = 1440, 1240


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path, default=Path(__file__).parents[1] / "docs" / "pictures")
    out = parser.parse_args().out
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("there is no Chromium on this machine")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as runs, sync_playwright() as driver:
        words = [sys.executable, "-m", "ultrascale", "studio", "--no-browser", "--port", str(port), "--runs", runs]
        server = subprocess.Popen(words)
        try:
            _wait_for(f"http://127.0.0.1:{port}/runs")
            browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for theme in ("light", "dark"):
                page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
                page.goto(f"http://127.0.0.1:{port}/?{QUESTION}&theme={theme}")
                page.wait_for_selector(".us-reasons li >> nth=5", timeout=300_000)
                page.wait_for_selector("#sensitivity .main-svg", timeout=300_000)
                time.sleep(2)
                end = page.evaluate("document.getElementById('cluster-map').getBoundingClientRect().bottom")
                page.set_viewport_size({"width": WIDTH, "height": int(end) + 40})
                time.sleep(1)
                page.screenshot(path=out / f"studio-{theme}.png")
                page.close()
            browser.close()
        finally:
            server.terminate()
            server.wait(10)


def _wait_for(url: str) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(url, timeout=10).close()
            return
        except OSError:
            time.sleep(0.2)
    sys.exit(f"{url} does not answer")


if __name__ == "__main__":
    main()
