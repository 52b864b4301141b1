"""Profiler ranges of a step: the pass, stage and micro-batch, and the technique that a collective belongs to.

There are no ranges unless a profiler records, nor inside torch.compile, where they would break the graph.
measure/trace_rank.py parses the same names.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler

from ultrascale.parallel.torch_private import is_profiling

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
"""by axis name"""

_NO_RANGE: AbstractContextManager[Any] = nullcontext()


def profile_range(*words: object) -> AbstractContextManager[Any]:
    """`with profile_range("forward stage", 0, "micro-batch", 3):`."""
    # In this order: torch.compile evaluates the first condition itself, and would recompile whenever the second changes.
    if torch.compiler.is_compiling() or not is_profiling():
        return _NO_RANGE
    return profiler.record_function(" ".join(map(str, words)))


def comm_range(axis: str, operation: str) -> AbstractContextManager[Any]:
    """`tensor all_reduce`, `data wait`."""
    return profile_range(TECHNIQUES.get(axis, axis), operation)
