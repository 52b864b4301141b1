"""CUDA graphs: when a step is captured and replayed, and which tensors of an engine must keep their addresses.

A CUDA graph replays its kernels on the data at the captured addresses. There is no GPU here: a stand-in repeats the work
itself with the batch of the capture, and returns the tensors of the capture, as a graph does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel.harness import engine_of, job_of, training_of
from ultrascale.kernels import cuda_graphs, selection
from ultrascale.kernels.cuda_graphs import EAGER_CALLS, CUDAGraphPool, CUDAGraphRunner
from ultrascale.kernels.selection import Kernels
from ultrascale.specs.layout import Layout
from ultrascale.train.engine import Engine


class Stream:
    device = torch.device("cpu")

    def wait_stream(self, _: Any) -> None: ...


class Graph:
    def again(self) -> None: ...

    def replay(self) -> None:
        self.again()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Replaces torch's CUDA graphs by fakes; returns those that were captured."""
    graphs: list[Graph] = []

    @contextmanager
    def record(graph: Graph, *_: Any, **__: Any) -> Iterator[None]:
        graphs.append(graph)
        yield

    fake = SimpleNamespace(
        Stream=lambda _: Stream(), graph_pool_handle=lambda: (0, 1), CUDAGraph=Graph, graph=record,
        current_stream=lambda: Stream(), stream=lambda _: nullcontext(), empty_cache=lambda: None, is_available=lambda: False,
    )  # fmt: skip
    monkeypatch.setattr(cuda_graphs.torch, "cuda", fake)
    return graphs


def test_cached_memory_is_freed_before_capture(stand_in: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    done = list[str]()
    monkeypatch.setattr(cuda_graphs.torch.cuda, "empty_cache", lambda: done.append("given back"))
    work = CUDAGraphRunner(lambda: done.append("step"), CUDAGraphPool(torch.device("cpu"), "always"))
    for _ in range(EAGER_CALLS + 1):
        work()
    assert done == [*EAGER_CALLS * ["step"], "given back", "step"]


def test_the_fifth_call_is_captured_and_later_ones_are_replays(stand_in: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    calls, replayed = list[int](), list[str]()
    monkeypatch.setattr(Graph, "again", lambda _: replayed.append("again"))
    pool = CUDAGraphPool(torch.device("cpu"), "always")
    work = CUDAGraphRunner(lambda: calls.append(1), pool, before=lambda: calls.append(0))
    for _ in range(EAGER_CALLS + 3):
        work()
    assert calls == [1, 1, 1, 1, 0, 1]  # as it is, and once on the stream; what goes before a recording; the recording
    assert replayed == ["again", "again"]
    assert len(stand_in) == 1
    assert pool.used


@pytest.mark.parametrize(
    ("mode", "launched_s", "waited_s", "worth"),
    [
        ("auto", 0.08, 0.001, True),  # a small model: the host launches, the GPU waits
        ("auto", 0.06, 0.42, False),
        ("always", 0.06, 0.42, True),
        ("never", 0.08, 0.001, False),
    ],
)
def test_a_graph_pays_off_where_the_step_is_host_bound(
    mode: Any, launched_s: float, waited_s: float, worth: bool, stand_in: list[Graph]
) -> None:
    pool = CUDAGraphPool(torch.device("cpu"), mode)
    pool.launched(launched_s)
    pool.waited(waited_s)
    assert pool.worth is worth
    pool.leave()
    pool.waited(0.0)
    assert not pool.worth


def test_a_failed_capture_falls_back_to_eager(stand_in: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def refuse(*_: Any, **__: Any) -> Iterator[None]:
        yield
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    monkeypatch.setattr(cuda_graphs.torch.cuda, "graph", refuse)
    pool = CUDAGraphPool(torch.device("cpu"), "always")
    first, second = CUDAGraphRunner(lambda: 7, pool), CUDAGraphRunner(lambda: 8, pool)
    for _ in range(EAGER_CALLS):
        assert (first(), second()) == (7, 8)
    assert first() == 7
    with pytest.warns(UserWarning, match="launched kernel by kernel: operation not permitted when stream is capturing$"):
        assert first() == 7
    assert second() == 8  # and nothing else is tried
    assert not pool.used


@pytest.mark.parametrize(
    ("family", "job", "layout", "training", "word"),
    [
        ("llama", {}, {}, {}, None),
        ("llama", {}, {"gas": 4, "recompute": "full"}, {}, None),
        ("llama", {}, {"dp": 2}, {}, "2 GPUs"),
        ("llama", {"precision": "fp16"}, {}, {}, "loss scale"),
        ("deepseek", {}, {}, {}, "loads"),
        ("llama", {}, {}, {"graphs": "never"}, "train.graphs"),
        ("llama", {}, {}, {"kernels": "eager"}, "train.kernels"),
        ("llama", {}, {}, {"document_mask": True}, "mask"),
        ("llama", {"optimizer": "sgd"}, {}, {}, "optimizer"),
    ],
)
def test_work_that_varies_between_steps_is_not_captured(
    family: str, job: dict[str, Any], layout: dict[str, Any], training: dict[str, Any], word: str | None
) -> None:
    found = selection.why_not_graphed(job_of(family, **job), Layout(**layout), training_of(**training))
    assert found is None if word is None else found is not None and word in found


def test_inputs_are_copied_into_the_same_buffers(stand_in: list[Graph]) -> None:
    pool = CUDAGraphPool(torch.device("cpu"), "auto")
    first = pool.copy_rows([(torch.tensor([1, 2]), torch.tensor([3]))])
    addresses = [part.data_ptr() for part in first[0]]
    second = pool.copy_rows([(torch.tensor([4, 5]), torch.tensor([6]))])
    assert [part.tolist() for part in second[0]] == [[4, 5], [6]]
    assert [part.data_ptr() for part in second[0]] == addresses


@pytest.mark.parametrize("gas", [1, 2])
def test_an_engine_that_replays_trains_as_one_that_does_not(
    gas: int, stand_in: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay writes to the addresses of the capture: rows, gradients, losses."""
    monkeypatch.setattr(CUDAGraphRunner, "_capture", _record)

    def engine(use_graph: bool) -> Engine:
        monkeypatch.setattr(selection, "choose", lambda *_: Kernels(single_microbatch=gas == 1, cuda_graphs=use_graph))
        return engine_of(job_of("llama"), Layout(gas=gas, mbs=2), training_of(steps=8, graphs="always"))

    plain, ours = engine(use_graph=False), engine(use_graph=True)
    for step in range(8):
        wanted, found = plain.step(step), ours.step(step)
        assert (found.loss, found.grad_norm) == (wanted.loss, wanted.grad_norm)
    assert ours.cuda_graphs is not None
    assert ours.cuda_graphs.used
    assert plain.evaluate(1) == ours.evaluate(1)


def _record(self: CUDAGraphRunner[Any]) -> None:
    """Captures as a graph would: a replay reads the batch of the capture and writes to the output of the capture."""
    engine = getattr(self.work, "__self__", None)
    batch = getattr(engine, "_batch", None)
    self.output = self.work()
    graph, output = Graph(), self.output

    def again() -> None:
        if isinstance(engine, Engine):
            engine._batch = batch
        fresh = self.work()
        if isinstance(output, torch.Tensor):
            output.copy_(fresh)

    graph.again = again  # type: ignore[method-assign]
    self.graph, self.graphs.used = graph, True  # type: ignore[assignment]
