"""Results that activation recomputation does not compute again: outputs of a GEMM together with its collective.

torch's checkpoint can save what one operator returns. For a GEMM whose partial results are reduced over ranks that is the
partial result, as long as the whole sequence, and reducing it again costs as much as the first time. Here the reduced result
is saved, and the recomputation runs neither the GEMM nor the collective.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Made = tuple[Tensor, ...]
_thread = threading.local()  # backward has threads of its own on a GPU


class RecomputeRegion:
    """The first pass and the recomputation of one checkpointed region."""

    def __init__(self, keeps: bool) -> None:
        """`keeps`: the recomputation reuses saved results; else it computes those again that backward needs."""
        self.keeps = keeps
        self.making = False
        """True inside such a result: its operators are not saved as well"""
        self._results: deque[Made] = deque()
        self._again = False

    @contextmanager
    def a_pass(self, again: bool) -> Iterator[None]:
        before, _thread.region = getattr(_thread, "region", None), self
        self._again = again
        try:
            yield
        finally:
            _thread.region = before

    def result(self, make: Callable[[], Made], needed_in_backward: bool) -> Made:
        if needed_in_backward and not self.keeps:
            return make()
        if self._again:
            return self._results.popleft()
        self.making = True
        try:
            made = make()
        finally:
            self.making = False
        # Detached from the graph. A result that backward does not need is saved as its shape alone.
        self._results.append(
            tuple(one.detach() if needed_in_backward else one.new_full((), torch.nan).expand(one.shape) for one in made)
        )
        return made


def cache_across_recompute(make: Callable[[], Made], needed_in_backward: bool = True) -> Made:
    """Runs `make`, or returns its result of the first pass where a region is recomputed.

    `needed_in_backward` False: no backward reads the values.
    """
    region: Any = getattr(_thread, "region", None)
    return make() if region is None else region.result(make, needed_in_backward)
