"""CUDA graphs: on one GPU the kernels of a step are captured once and replayed with a single launch.

The kernels of a small model end before the host has launched the next one, so the GPU idles; a graph is launched as a whole.
Captured work must be the same in every step: the same tensor addresses, and nothing that the host reads or decides.
`CUDAGraphRunner` runs such work eagerly a few times, until kernels are compiled and states exist, and then captures it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Generic, TypeVar, cast

import torch

from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.training import Graphs, Training

AS_IT_IS = 3  # calls before it is decided whether to record; the second is the one whose memory a run accounts for
T = TypeVar("T")
Rows = list[tuple[torch.Tensor, ...]]


def why_not(job: Job, layout: Layout, training: Training) -> str | None:
    """Why a GPU is launched kernel by kernel; None: its steps can be recorded."""
    if training.graphs == "never":
        return "train.graphs is never"
    if layout.gpus > 1:
        return f"the layout has {layout.gpus} GPUs, and their exchanges are not recorded"
    if training.kernels != "fused":
        return f"train.kernels is {training.kernels}"
    if job.model.moe is not None:
        return "experts' loads are read in every step"
    if job.precision == "fp16":
        return "fp16's loss scale changes"
    if job.optimizer != "adamw" or layout.offload != "none":
        return "the optimizer is torch's"
    if training.document_mask:
        return "attention's mask is made anew for each batch"
    return None


class CUDAGraphPool:
    """The stream and the memory that recorded work shares, and the rows that every step finds at the same place."""

    def __init__(self, device: torch.device, wish: Graphs) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()
        self.wish = wish
        self.worth = wish == "always"
        """whether to record: what memory a graph needs is set aside for it"""
        self.used = False
        self.rows: Rows = []
        self._launched_s = 0.0

    def hold(self, rows: Rows) -> Rows:
        """A step's rows of the host on the device, where the last step's were."""
        if not self.rows:
            self.rows = [tuple(torch.empty_like(part, device=self.stream.device) for part in parts) for parts in rows]
        for held, parts in zip(self.rows, rows, strict=True):
            for there, part in zip(held, parts, strict=True):
                there.copy_(part, non_blocking=True)
        return self.rows

    def launched(self, seconds: float) -> None:
        """How long the host took to launch a step's forward and backward."""
        self._launched_s = seconds

    def waited(self, seconds: float) -> None:
        """How long it then waited for the GPU: where it launches for longer than it waits, the GPU mostly waits for it."""
        self.worth = self.wish == "always" or (self.wish == "auto" and seconds < self._launched_s)

    def leave(self) -> None:
        """Nothing more is recorded."""
        self.wish, self.worth = "never", False


class CUDAGraphRunner(Generic[T]):
    """Work that is recorded the fifth time it is called. What it returns stays where it is and is filled again."""

    def __init__(self, work: Callable[[], T], tape: CUDAGraphPool, before: Callable[[], None] | None = None) -> None:
        self.work, self.tape, self.before = work, tape, before
        self.calls, self.wanted = 0, False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.made: T | None = None

    def __call__(self) -> T:
        if self.calls == AS_IT_IS:
            self.wanted = self.tape.worth
        self.calls += 1
        if not self.wanted:
            return self.work()
        if self.calls == AS_IT_IS + 1:
            return self._once_there()
        if self.calls == AS_IT_IS + 2:
            self._record()
        if self.graph is None:
            return self.work()
        self.graph.replay()
        return cast(T, self.made)

    def _once_there(self) -> T:
        """On the stream that is recorded next, so that what libraries keep by stream is there."""
        torch.cuda.empty_cache()  # of the memory that other steps used: a stream's blocks are its own
        here, stream = torch.cuda.current_stream(), self.tape.stream
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            made = self.work()
        here.wait_stream(stream)
        return made

    def _record(self) -> None:
        if self.before is not None:
            self.before()
        graph = torch.cuda.CUDAGraph()
        try:
            # Errors of this thread's alone: the one that reads ahead pins memory meanwhile.
            with torch.cuda.graph(graph, self.tape.pool, self.tape.stream, capture_error_mode="thread_local"):
                self.made = self.work()
        except RuntimeError as error:  # a kernel that cannot be recorded, or no memory for what a graph sets aside
            warnings.warn(f"steps are launched kernel by kernel: {str(error).splitlines()[0]}", stacklevel=2)
            self.tape.leave()
            self.made, self.wanted = None, False
            return
        self.graph = graph
        self.tape.used = True


def recorded(work: Callable[[], T], tape: CUDAGraphPool | None, before: Callable[[], None] | None = None) -> Callable[[], T]:
    """The work itself where nothing is recorded; `before`: lets go of what recording makes anew."""
    return work if tape is None else CUDAGraphRunner(work, tape, before)
