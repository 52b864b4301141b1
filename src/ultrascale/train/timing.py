"""Times GPU kernels with CUDA graphs, for autotuning."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise

import torch

WARM_UP, TIMED, REPLAYED = 2, 4, 3


class TimedGraph:
    """Several runs of an action captured in one graph, so that the GPU is timed and not the launch overhead of the host."""

    def __init__(self, action: Callable[[], object], device: torch.device) -> None:
        self.graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                action()
            with torch.cuda.graph(self.graph, stream=stream):
                for _ in range(TIMED):
                    action()

    def times_ms(self, replays: int = REPLAYED) -> list[float]:
        """The time of one run of the action, for each replay."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]  # type: ignore[no-untyped-call]
        marks[0].record()
        for mark in marks[1:]:
            self.graph.replay()
            mark.record()
        marks[-1].synchronize()
        return [float(start.elapsed_time(end)) / TIMED for start, end in pairwise(marks)]


def in_turns_ms(pieces: dict[str, TimedGraph], rounds: int, turn_ms: float) -> dict[str, float]:
    """The median of each, measured in turns, so that the temperature of the card is the same for all."""
    times: dict[str, list[float]] = {name: [] for name in pieces}
    for _ in range(rounds):
        for name, piece in pieces.items():
            once = piece.times_ms(1)[0]
            times[name] += piece.times_ms(max(REPLAYED, round(turn_ms / once / TIMED)))
    return {name: statistics.median(each) for name, each in times.items()}
