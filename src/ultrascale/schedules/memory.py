"""What a rank holds for the backward: activations per stage and micro-batch, along its action list.

A forward keeps the stage's activations; a full backward lets them go. With a split backward they stay until the weight
gradient, which needs the saved inputs: the conservative reading, as an engine may free part of them after I.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from ultrascale.schedules.actions import KINDS, ActionKind
from ultrascale.schedules.registry import lists


@dataclass(frozen=True)
class InFlightCounts:
    """What every rank holds while each of its actions runs: ranks × actions, a shorter list with empty ones at its end."""

    waiting: NDArray[np.float64]
    """micro-batches between their forward and their backward, of each of the rank's stages"""
    deferred: NDArray[np.float64]
    """micro-batches from the start of their input gradient to the end of their weight gradient, of each stage"""
    stage: NDArray[np.int64]
    """the action's own stage, of the whole pipeline's"""
    kind: NDArray[np.int64]
    """its place in KINDS, −1 where there is no action"""

    @cached_property
    def own_stage(self) -> NDArray[np.bool_]:
        """Which of the rank's stages the action is of."""
        # Looped or folded, a rank's stages rise in the order in which a micro-batch passes them, one in every `ranks`.
        return np.asarray((self.stage // len(self.stage))[..., None] == np.arange(self.waiting.shape[2]))

    @cached_property
    def by_kind(self) -> dict[ActionKind, NDArray[np.bool_]]:
        """Which actions are of each kind."""
        return {kind: np.asarray(self.kind == KINDS.index(kind)) for kind in ActionKind}

    @cached_property
    def ends_backward(self) -> NDArray[np.bool_]:
        """Ends a backward, of each of the rank's stages."""
        return self.own_stage & (self.by_kind[ActionKind.B] | self.by_kind[ActionKind.W])[..., None]

    @cached_property
    def backwards_done(self) -> NDArray[np.int64]:
        """Backwards that ended before, of each of the rank's stages."""
        return np.asarray(np.cumsum(self.ends_backward, axis=1) - self.ends_backward)

    @cached_property
    def after_first_backward(self) -> NDArray[np.bool_]:
        """The action's own stage has finished a backward before."""
        return np.asarray((self.own_stage & (self.backwards_done > 0)).any(axis=2))

    @cached_property
    def after_last_backward(self) -> NDArray[np.bool_]:
        """Each of the rank's stages has finished its last backward before."""
        return np.asarray(self.backwards_done >= self.ends_backward.sum(axis=1, keepdims=True))

    @cached_property
    def ends_last_backward(self) -> NDArray[np.bool_]:
        """Ends the last backward of its stage."""
        last = self.backwards_done == self.ends_backward.sum(axis=1, keepdims=True) - 1
        return np.asarray((self.ends_backward & last).any(axis=2))

    @cached_property
    def consecutive_backwards(self) -> NDArray[np.bool_]:
        """Backwards that follow on another one of the same stage, its weights' turns left aside."""
        return self._follows(ActionKind.W) & (self.by_kind[ActionKind.B] | self.by_kind[ActionKind.I])

    @cached_property
    def consecutive_input_grads(self) -> NDArray[np.bool_]:
        """Input gradients after which no weights' turn came yet before the stage's next."""
        return self._follows(ActionKind.F) & self.by_kind[ActionKind.I]

    def _follows(self, left_aside: ActionKind) -> NDArray[np.bool_]:
        """Actions that follow on one of their own kind and stage, those of one kind left aside."""
        included = (self.kind != KINDS.index(left_aside))[..., None] & self._of_stages
        return np.asarray((included & (self._kinds_before(included) == self.kind[..., None])).any(axis=2))

    @cached_property
    def forward_before(self) -> NDArray[np.bool_]:
        """Each of the rank's stages had a forward as its last action before this one."""
        return np.asarray(self._kinds_before(self._of_stages) == KINDS.index(ActionKind.F))

    @property
    def _of_stages(self) -> NDArray[np.bool_]:
        return np.asarray((self.kind >= 0)[..., None] & self.own_stage)

    def _kinds_before(self, included: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The kind of the last action of each stage before this one, of those included; −1 where there was none."""
        places = np.where(included, np.arange(self.kind.shape[1])[:, None], -1)
        last = np.maximum.accumulate(places, axis=1)
        before = np.concatenate((np.full_like(last[:, :1], -1), last[:, :-1]), axis=1)
        kinds = np.take_along_axis(self.kind[..., None], np.maximum(before, 0), axis=1)
        return np.where(before >= 0, kinds, -1)


@lru_cache(maxsize=128)
def counts(name: str, ranks: int, microbatches: int, virtual_stages: int) -> InFlightCounts:
    """Kept, because a search asks about few pipelines many times, each time with other bytes."""
    arrays = lists(name, ranks, microbatches, virtual_stages)
    longest = int(np.diff(arrays.start).max())
    position = np.arange(len(arrays.kind)) - np.repeat(arrays.start[:-1], np.diff(arrays.start))
    kind = np.full((ranks, longest), -1)
    kind[arrays.rank, position] = arrays.kind
    stage = np.zeros((ranks, longest), dtype=np.int64)
    stage[arrays.rank, position] = arrays.stage
    nothing = np.zeros((ranks, longest, virtual_stages))
    own = InFlightCounts(nothing, nothing, stage, kind).own_stage
    forward, backward, inputs, weights = (own & (kind == KINDS.index(one))[..., None] for one in ActionKind)
    waiting = np.cumsum(forward * 1.0 - backward - inputs, axis=1)
    # A weight gradient lets go when it ends, not when it starts.
    deferred = np.cumsum(inputs * 1.0 - weights, axis=1) + weights
    return InFlightCounts(waiting, deferred, stage, kind)
