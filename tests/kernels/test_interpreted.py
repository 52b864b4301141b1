"""The Triton kernels' own tests, by Triton's interpreter; in processes of their own: it is chosen when Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("kernel", ["fused", "loss", "adamw", "float8", "cast", "delta_rule"])
def test_kernels(kernel: str) -> None:
    file = Path(__file__).with_name(f"test_{kernel}_triton.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(file)]
    if Version(version("triton")) < Version("3.7"):  # whose interpreter has no loops to a bound that a kernel computes
        command += ["-k", "not norm_backward"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
