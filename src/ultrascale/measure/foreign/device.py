"""The device of a rehearsed program: tensors without memory on any machine, or one real GPU. All that differs is here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ultrascale.measure.foreign.compiled import rehearse_compiled
from ultrascale.measure.foreign.gpu import ValuesOfZero, answer_for_gpu, without_gpu
from ultrascale.measure.foreign.peers import without_peers
from ultrascale.measure.foreign.request import BALANCED, ForeignRequest
from ultrascale.measure.foreign.watcher import Watcher
from ultrascale.measure.peer_values import values_of_peers

VALUES = "tensors have no values: what the program reads of them is zero, and a mask selects everything"
ALLOCATOR = (
    "the peak is the allocator's, without memory by owner; times are of computing alone: collectives return at once and move "
    "nothing"
)
COUNTED = "FLOPs and collectives are of one more step, which runs operator by operator, without torch.compile"
NOT_COUNTED = "FLOPs and collectives are missing: the step that counts them, operator by operator, failed"
WARM_UP = 4
"""steps that are not timed: compilation, optimizer states, the allocator's first blocks"""

Done = Callable[[Watcher], None]


def device_of(request: ForeignRequest, note: Callable[[str], Any], save: Done, done: Done) -> MetaDevice | CudaDevice:
    """`save` is called with what is known before the last step, on a GPU; `done` at the end of it."""
    if request.on_gpu:
        return CudaDevice(request, note, save, done)
    return MetaDevice(request, note, done)


class MetaDevice:
    def __init__(self, request: ForeignRequest, note: Callable[[str], Any], done: Done) -> None:
        self.fake, self.note = ValuesOfZero(), note
        note(VALUES)

        def noted(watcher: Watcher) -> None:
            if self.fake.routed:
                note(BALANCED)
            done(watcher)

        self.watcher = watcher = Watcher(self.fake, request.steps, noted)
        local_rank = request.rank % request.gpus_per_node
        answer_for_gpu(local_rank, request.gpus_per_node, lambda: (watcher.current, watcher.peak))
        without_peers(request.rank, request.world)

    @contextmanager
    def running(self) -> Iterator[None]:
        rehearse_compiled(self.fake, self.note)
        with without_gpu(self.fake), self.watcher:
            yield


class CudaDevice:
    def __init__(self, request: ForeignRequest, note: Callable[[str], Any], save: Done, done: Done) -> None:
        note(ALLOCATOR)

        def measured(watcher: Watcher) -> None:
            if not request.count:
                done(watcher)
            save(watcher)
            note(COUNTED)

        self.watcher = CudaWatcher(request.steps, measured, done)
        without_peers(request.rank, request.world, on_gpu=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        with values_of_peers():
            yield


class CudaWatcher(Watcher):  # type: ignore[no-untyped-call]
    """Takes the allocator's peak and the time of undisturbed steps, then counts the operators of one more.

    The peak is the highest of all steps but the first and the last; the time is the mean of those after the warm-up. A
    dispatch mode, which counts, keeps torch.compile from running compiled code: so it runs in no measured step.
    """

    def __init__(self, steps: int, measured: Done, done: Done) -> None:
        super().__init__(None, steps, done)
        self.measured = measured
        self.warm_up = min(WARM_UP, steps - 2)
        self._started = 0.0
        self._allocated = 0

    def _hook_modules(self) -> None:
        """Not at all: torch.compile would capture them."""

    def _end_step(self) -> None:
        if self.completed == self.steps:
            self.peak = self._allocated  # counting tracked some of it
            self.done(self)
            return
        if self.completed > 1:
            self.peak = self._allocated = max(self._allocated, torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        if self.completed == self.warm_up:
            torch.cuda.synchronize()
            self._started = time.perf_counter()
        if self.completed == self.steps - 1:
            torch.cuda.synchronize()
            self.step_s = (time.perf_counter() - self._started) / (self.completed - self.warm_up)
            self.measured(self)
            torch.compiler.set_stance("force_eager")
            self._begin()

    def after_operator(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        # Norms and optimizers run without gradients, and the loss is detached after its backward.
        if torch.is_grad_enabled() and func is not torch.ops.aten.detach.default:
            self._after_backward = False
        self.count(func, args, kwargs, result)
