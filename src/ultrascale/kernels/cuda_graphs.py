"""CUDA graphs: the kernels of a step are captured once, collectives included, and replayed with a single launch.

Kernels of a small model, or of a slice of a large one, end before the host has launched the next one, so the GPU idles; a graph
is launched as a whole.
Captured work must be the same in every step: the same tensor addresses, and nothing that the host reads or decides.
`CUDAGraphRunner` runs such work eagerly a few times, until kernels are compiled and states exist, and then captures it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar, cast

import torch

from ultrascale.specs.errors import RunError
from ultrascale.specs.training import Graphs

EAGER_CALLS = 3  # calls before it is decided whether to capture; the second is the one whose memory a run measures
FREE_MEMORY = 1.25  # of what a step allocates: evaluations run beside the graph, whose memory stays reserved
T = TypeVar("T")
Rows = list[tuple[torch.Tensor, ...]]


class CUDAGraphPool:
    """The stream and memory pool of all graphs, and the input rows, which have the same addresses in every step."""

    def __init__(
        self, device: torch.device, mode: Graphs, all_reduce_max: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        """`all_reduce_max`: over all ranks, which capture together or not at all; None: this is the only one."""
        self.all_reduce_max = all_reduce_max
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()
        self.mode = mode
        self.worth = mode == "always"
        """whether this rank's steps are host-bound"""
        self._decision: bool | None = None
        self.used = False
        self.paused = False
        """set in a batch-size ramp, where steps differ: its calls run eagerly, and do not count"""
        self.uncaptured = False
        self.rows: Rows = []
        self._launched_s = 0.0

    def copy_rows(self, rows: Rows) -> Rows:
        """Copies a step's rows from the host to the device buffers of the last step's."""
        if not self.rows:
            self.rows = [tuple(torch.empty_like(part, device=self.stream.device) for part in parts) for parts in rows]
        for buffers, parts in zip(self.rows, rows, strict=True):
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part, non_blocking=True)
        return self.rows

    def launched(self, seconds: float) -> None:
        """Records how long the host took to launch a step's forward and backward."""
        self._launched_s = seconds

    def waited(self, seconds: float) -> None:
        """Records how long the host then waited for the GPU: if launching takes longer than waiting, the step is host-bound."""
        self.worth = self.mode == "always" or (self.mode == "auto" and seconds < self._launched_s)

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Runs what it launches kernel by kernel, also after its capture, and does not count it."""
        self.uncaptured = True
        try:
            yield
        finally:
            self.uncaptured = False

    def decide(self) -> bool:
        """Whether steps are captured: if some rank is host-bound and all have the memory, which a graph reserves."""
        if self._decision is None:
            votes = torch.tensor([self.worth, self.mode == "auto" and not _has_memory()], device=self.stream.device).float()
            host_bound, too_large = (votes if self.all_reduce_max is None else self.all_reduce_max(votes)).tolist()
            self._decision = bool(host_bound and not too_large)
        return self._decision

    def leave(self) -> None:
        """Disables further capture."""
        self.mode, self.worth, self._decision = "never", False, False


def _has_memory() -> bool:
    """Whether what a step allocates beside its states fits once more, after cached blocks are freed."""
    free, _ = torch.cuda.mem_get_info()
    now, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    return FREE_MEMORY * (peak - now) <= free + torch.cuda.memory_reserved() - now


class CUDAGraphRunner(Generic[T]):
    """Captures `work` in its fifth call and replays it from then on. Its result keeps its address and is overwritten."""

    def __init__(self, work: Callable[[], T], graphs: CUDAGraphPool, before: Callable[[], None] | None = None) -> None:
        self.work, self.graphs, self.before = work, graphs, before
        self.calls, self.wanted = 0, False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.output: T | None = None

    def __call__(self) -> T:
        if self.graphs.paused or self.graphs.uncaptured:
            return self.work()
        if self.calls == EAGER_CALLS:
            self.wanted = self.graphs.decide()
        self.calls += 1
        if not self.wanted:
            return self.work()
        if self.calls == EAGER_CALLS + 1:
            return self._run_on_capture_stream()
        if self.calls == EAGER_CALLS + 2:
            self._capture()
        if self.graph is None:
            return self.work()
        self.graph.replay()
        return cast(T, self.output)

    def _run_on_capture_stream(self) -> T:
        """Runs the work on the capture stream once, so that per-stream state of libraries exists before capture."""
        torch.cuda.empty_cache()  # memory of earlier steps: cached blocks belong to one stream
        current, stream = torch.cuda.current_stream(), self.graphs.stream
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            output = self.work()
        current.wait_stream(stream)
        return output

    def _capture(self) -> None:
        if self.before is not None:
            self.before()
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: the prefetch thread pins memory during the capture.
            with torch.cuda.graph(graph, self.graphs.pool, self.graphs.stream, capture_error_mode="thread_local"):
                self.output = self.work()
        except RuntimeError as error:  # a kernel that cannot be captured, or no memory for the graph
            reason = str(error).splitlines()[0]
            if self.graphs.all_reduce_max is not None:  # FSDP2's states are those of the middle of a step
                raise RunError(f"a step cannot be captured as a CUDA graph: {reason}. Try train.graphs=never") from error
            warnings.warn(f"steps are launched kernel by kernel: {reason}", stacklevel=2)
            self.graphs.leave()
            self.output, self.wanted = None, False
            return
        self.graph = graph
        self.graphs.used = True


def graphed(work: Callable[[], T], graphs: CUDAGraphPool | None, before: Callable[[], None] | None = None) -> Callable[[], T]:
    """A CUDAGraphRunner of the work, or the work itself without graphs; `before`: frees what the capture allocates again."""
    return work if graphs is None else CUDAGraphRunner(work, graphs, before)
