"""What a region that is recomputed does not make twice: results that stand for an exchange, or that nobody asks for again.

torch's checkpoint can keep what an operator returns. Of a product whose parts are summed over ranks that is the part, as long
as the whole sequence, and to gather or to sum once more costs as much as the first time. Here the result of both together is
kept, and the second pass neither computes nor exchanges.
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


class Region:
    """The two passes over one region."""

    def __init__(self, keeps: bool) -> None:
        """`keeps`: results are given to the second pass; else it makes them again, but for those that nobody asks for."""
        self.keeps = keeps
        self.making = False
        """within such a result: what makes it is not to be kept besides"""
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

    def result(self, make: Callable[[], Made], asked: bool) -> Made:
        if asked and not self.keeps:
            return make()
        if self._again:
            return self._results.popleft()
        self.making = True
        try:
            made = make()
        finally:
            self.making = False
        # Without the graph that hangs on it; of what nobody asks for, the shape alone, with no number in it.
        self._results.append(tuple(one.detach() if asked else one.new_full((), torch.nan).expand(one.shape) for one in made))
        return made


def once(make: Callable[[], Made], asked: bool = True) -> Made:
    """What `make` makes, or made in the first pass over a region that is computed again. Not `asked`: no backward reads it."""
    region: Any = getattr(_thread, "region", None)
    return make() if region is None else region.result(make, asked)
