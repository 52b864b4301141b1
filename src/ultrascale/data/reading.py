"""Opens and memory-maps data files; system errors become SpecErrors with a clear message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import open_regular


def cannot_read(path: Path, error: OSError | ValueError) -> SpecError:
    reason = (getattr(error, "strerror", None) or str(error)).lower()
    if isinstance(error, FileNotFoundError):
        return SpecError(f"{path} does not exist: name a file or a folder that does")
    return SpecError(f"{path} cannot be read ({reason}): name one that can")


def start_of(path: Path, count: int) -> bytes:
    """The first `count` bytes of a file, or all of a shorter one."""
    try:
        with open_regular(path) as file:
            return file.read(count)
    except OSError as error:
        raise cannot_read(path, error) from None


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except (OSError, ValueError) as error:
        raise cannot_read(path, error) from None


def mapped(path: Path, dtype: np.dtype[Any], offset: int, count: int) -> npt.NDArray[Any]:
    """Part of a file as a memory-mapped array. The caller has checked that the part exists."""
    if count == 0:
        return np.empty(0, dtype)
    try:
        return np.memmap(path, dtype, mode="r", offset=offset, shape=(count,)).view(np.ndarray)
    except (OSError, ValueError) as error:
        raise cannot_read(path, error) from None
