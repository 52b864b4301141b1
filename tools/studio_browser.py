"""The studio on a free port with an empty folder of runs, and a headless Chromium: for its pictures and its benchmark."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import sync_playwright


@contextmanager
def studio_browser(*options: str) -> Iterator[tuple[str, Any]]:
    """The studio's address, once it answers, and the browser."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("there is no Chromium on this machine")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as runs, sync_playwright() as driver:
        words = [sys.executable, "-m", "ultrascale", "studio", "--no-browser", "--port", str(port), "--runs", runs, *options]
        server = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        try:
            _wait_for(f"{address}/runs")
            browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            yield address, browser
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
