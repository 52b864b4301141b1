"""What the engines themselves make of our files, in processes of their own.

They bring threads, patches of torch and half a gigabyte along, which a process that forks ranks for other tests must not have.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("checks", ["engines_read", "engines_megatron"])
def test_engines(checks: str) -> None:
    file = Path(__file__).with_name(f"{checks}.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
