"""Names for stretches of a step, which a profiler shows: what runs, for which stage and micro-batch, whose exchange it is.

Nothing is named unless a profiler records, nor inside what torch.compile traces: there the name would break the graph.
measure/trace/names.py reads the same names back.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler

TECHNIQUES = {
    "tp": "tensor",
    "cp": "context",
    "ep": "expert",
    "pp": "pipeline",
    "zero": "zero",
    "dp": "data",
    "norm": "bookkeeping",
    "world": "bookkeeping",
}
"""by the name of an axis"""

_NOTHING: AbstractContextManager[Any] = nullcontext()


def named(*words: object) -> AbstractContextManager[Any]:
    """`with named("forward stage", 0, "micro-batch", 3):`."""
    # Asked in this order: torch.compile answers the first itself, and would compile anew whenever the second changes.
    if torch.compiler.is_compiling() or not profiler._is_profiler_enabled:
        return _NOTHING
    return profiler.record_function(" ".join(map(str, words)))


def exchange(axis: str, what: str) -> AbstractContextManager[Any]:
    """`tensor all_reduce`, `data wait`."""
    return named(TECHNIQUES.get(axis, axis), what)
