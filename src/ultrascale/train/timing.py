"""How long a GPU takes for a piece of a step, where a run chooses among kernels by it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise

import torch

WARM_UP, TIMED, REPLAYED = 2, 4, 3


def recorded_ms(action: Callable[[], object], device: torch.device, at_least_s: float = 0.0) -> float:
    """Recorded, so that it is the GPU that is timed and not how fast a host launches short kernels."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            action()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(TIMED):
                action()
    times = _replayed_ms(graph, REPLAYED)
    if (left_ms := 1e3 * at_least_s - sum(times)) > 0:
        times = _replayed_ms(graph, max(REPLAYED, round(left_ms / statistics.median(times))))
    return statistics.median(times) / TIMED


def _replayed_ms(graph: torch.cuda.CUDAGraph, times: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    marks[-1].synchronize()
    return [float(start.elapsed_time(end)) for start, end in pairwise(marks)]


def said(error: Exception) -> str:
    """What a kernel that fails says, in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
