"""A cache of results that activation recomputation reuses: the outputs of a GEMM together with its collective.

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

Tensors = tuple[Tensor, ...]
_thread = threading.local()  # on a GPU, backward runs in its own threads


class RecomputeRegion:
    """The first pass and the recomputation of one checkpointed region."""

    def __init__(self, saves: bool) -> None:
        """`saves`: the recomputation reuses saved results; otherwise it recomputes those that backward needs."""
        self.saves = saves
        self.computing = False
        """True while a cached result is computed: the policy must not save its operators as well"""
        self._results: deque[Tensors] = deque()
        self._recomputing = False

    @contextmanager
    def run_pass(self, recomputing: bool) -> Iterator[None]:
        before, _thread.region = getattr(_thread, "region", None), self
        self._recomputing = recomputing
        try:
            yield
        finally:
            _thread.region = before

    def result(self, compute: Callable[[], Tensors], needed_in_backward: bool) -> Tensors:
        if needed_in_backward and not self.saves:
            return compute()
        if self._recomputing:
            return self._results.popleft()
        self.computing = True
        try:
            outputs = compute()
        finally:
            self.computing = False
        # Detached from the graph. A result that backward does not need is saved as its shape alone.
        self._results.append(
            tuple(
                output.detach() if needed_in_backward else output.new_full((), torch.nan).expand(output.shape)
                for output in outputs
            )
        )
        return outputs


def cache_across_recompute(compute: Callable[[], Tensors], needed_in_backward: bool = True) -> Tensors:
    """Runs `compute`, or returns its result of the first pass where a region is recomputed.

    `needed_in_backward` False: no backward reads the values.
    """
    region: Any = getattr(_thread, "region", None)
    return compute() if region is None else region.result(compute, needed_in_backward)
