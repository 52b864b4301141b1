"""The words of a pipeline schedule: an action, and a schedule as one list of actions per rank.

A *stage* is a slice of the model's layers, numbered from 0 at the embedding; a rank holds `virtual_stages` of them.
A schedule says only in which order a rank computes. When it may compute follows from the data: `simulate` finds the
times, the engine waits for messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class ActionKind(StrEnum):
    """What is computed for one micro-batch on one stage."""

    F = "F"  # forward
    B = "B"  # full backward: input and weight gradients in one go
    I = "I"  # noqa: E741 - gradient of the input only; the papers call it B. The stage before waits for it
    W = "W"  # gradient of the weights only; nobody waits for it, so it can fill a bubble


KINDS = tuple(ActionKind)  # an array holds a kind as its place here


class Action(NamedTuple):
    """One piece of work of one rank. `stage` is global: 0 … ranks × virtual_stages − 1."""

    kind: ActionKind
    stage: int
    microbatch: int
    paired: bool = False  # runs overlapped with the next action of the list (a forward with a backward, DualPipe)

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of stage {self.stage}"


def rank_of(stage: int, ranks: int, v_shaped: bool) -> int:
    """The rank that holds a global stage.

    A V-shaped placement folds the pipeline back on itself: rank r holds stages r and 2·ranks − 1 − r, so that the first rank
    has both the embedding and the loss, and the last rank hands over to itself.
    """
    return min(stage, 2 * ranks - 1 - stage) if v_shaped else stage % ranks


def stages_of(rank: int, ranks: int, virtual_stages: int, v_shaped: bool) -> tuple[int, ...]:
    """The global stages of a rank, in the order in which a micro-batch passes them."""
    return (rank, 2 * ranks - 1 - rank) if v_shaped else tuple(range(rank, ranks * virtual_stages, ranks))


@dataclass(frozen=True)
class ActionArrays:
    """The lists of a schedule as arrays with an entry per action, rank after rank: what is asked of thousands at once."""

    ranks: int
    virtual_stages: int
    microbatches: int
    kind: NDArray[np.int64]
    stage: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    paired: NDArray[np.bool_]
    start: NDArray[np.int64]
    """where each rank's list begins, and where the last one ends"""

    @property
    def stages(self) -> int:
        return self.ranks * self.virtual_stages

    @property
    def rank(self) -> NDArray[np.int64]:
        """Whose action it is."""
        return np.repeat(np.arange(self.ranks), np.diff(self.start))


@dataclass(frozen=True)
class Schedule:
    """What every rank computes, in order."""

    name: str
    ranks: int
    virtual_stages: int
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    v_shaped: bool = False

    @property
    def stages(self) -> int:
        return self.ranks * self.virtual_stages

    def rank_of(self, stage: int) -> int:
        return rank_of(stage, self.ranks, self.v_shaped)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return stages_of(rank, self.ranks, self.virtual_stages, self.v_shaped)

    def arrays(self) -> ActionArrays:
        actions = [action for by_rank in self.actions for action in by_rank]
        kind, stage, microbatch = (
            np.asarray(values, dtype=np.int64)
            for values in zip(*((KINDS.index(one.kind), one.stage, one.microbatch) for one in actions), strict=True)
        )
        start = np.cumsum([0, *map(len, self.actions)])
        paired = np.asarray([one.paired for one in actions])
        return ActionArrays(self.ranks, self.virtual_stages, self.microbatches, kind, stage, microbatch, paired, start)
