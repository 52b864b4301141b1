"""Freed memory really goes back to the system."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from ultrascale.launch import local
from ultrascale.train import memory

PIECE, PIECES = 64 * 1024, 3000  # below glibc's threshold for mmap


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fill_and_free(rank: int, nproc: int, store: str) -> tuple[int, int, int]:
    pieces = [bytearray(os.urandom(16) * (PIECE // 16)) for _ in range(PIECES)]
    full = resident()
    del pieces[:-1]  # the last one lies at the top and pins what is below
    freed = resident()
    memory.trim_heap()
    return full, freed, resident()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what glibc keeps")
def test_a_fragmented_heap_returns_free_memory() -> None:
    ((full, freed, given),) = local.run(fill_and_free, 1, timeout_s=30)
    assert full - freed < 0.5 * PIECE * PIECES  # glibc keeps it
    assert full - given > 0.8 * PIECE * PIECES
