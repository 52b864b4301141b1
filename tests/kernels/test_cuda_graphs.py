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
import torch.distributed as dist

from parallel.harness import SEQ, engine_of, in_ranks, job_of, training_of
from ultrascale.kernels import cuda_graphs, selection
from ultrascale.kernels.cuda_graphs import EAGER_CALLS, CUDAGraphPool, CUDAGraphRunner
from ultrascale.kernels.selection import Kernels
from ultrascale.measure.rehearse_world import single_rank_world
from ultrascale.parallel import comm, torch_private
from ultrascale.specs.errors import RunError
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


def test_a_captured_step_can_run_kernel_by_kernel_again(stand_in: list[Graph]) -> None:
    """As a rehearsal does, whose counters see nothing of a replay."""
    calls = list[int]()
    pool = CUDAGraphPool(torch.device("cpu"), "always")
    work = CUDAGraphRunner(lambda: calls.append(1), pool)
    for _ in range(EAGER_CALLS + 2):
        work()
    captured = len(calls)
    with pool.eager():
        work()
    assert len(calls) == captured + 1
    assert work.calls == EAGER_CALLS + 2


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


@pytest.mark.parametrize(
    ("mode", "own", "others", "capture"),
    [
        ("auto", (True, True), (0.0, 0.0), True),
        ("auto", (False, True), (1.0, 0.0), True),  # the others wait for the rank whose host is slow
        ("auto", (True, False), (0.0, 0.0), False),
        ("auto", (True, True), (1.0, 1.0), False),
        ("auto", (False, True), (0.0, 0.0), False),
        ("always", (True, False), (0.0, 0.0), True),
    ],
)
def test_ranks_decide_together(
    mode: Any,
    own: tuple[bool, bool],
    others: tuple[float, float],
    capture: bool,
    stand_in: list[Graph],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`own` and `others`: whether a rank is host-bound; whether this one has memory, and some other one does not."""
    monkeypatch.setattr(cuda_graphs, "_has_memory", lambda: own[1])
    asked = list[torch.Tensor]()

    def all_reduce_max(votes: torch.Tensor) -> torch.Tensor:
        asked.append(votes)
        return torch.maximum(votes, torch.tensor(others))

    pool = CUDAGraphPool(torch.device("cpu"), mode, all_reduce_max)
    pool.worth = own[0]
    assert pool.decide() is capture
    assert pool.decide() is capture
    assert len(asked) == 1  # a collective: once


@pytest.mark.parametrize(("free_gib", "enough"), [(5.6, True), (5.4, False)])
def test_a_graph_needs_a_step_s_memory_once_more(free_gib: float, enough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 GiB are states, and a step allocates 6 beside them; 12 are reserved, of which 2 can be freed."""
    gib = 2**30
    fake = SimpleNamespace(
        mem_get_info=lambda: (int(free_gib * gib), 80 * gib), memory_allocated=lambda: 10 * gib,
        max_memory_allocated=lambda: 16 * gib, memory_reserved=lambda: 12 * gib,
    )  # fmt: skip
    monkeypatch.setattr(cuda_graphs.torch, "cuda", fake)
    assert cuda_graphs._has_memory() is enough


def test_a_failed_capture_of_several_ranks_ends_the_run(stand_in: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        if stand_in:
            raise RuntimeError("operation not permitted when stream is capturing")

    work = CUDAGraphRunner(fail, CUDAGraphPool(torch.device("cpu"), "always", lambda votes: votes))
    for _ in range(EAGER_CALLS + 1):
        work()
    with pytest.raises(RunError, match=r"not permitted.*train\.graphs=never"):
        work()


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
        ("llama", {}, {"dp": 2, "tp": 2, "cp": 2, "zero": 3}, {}, None),
        ("llama", {}, {"pp": 2, "gas": 2}, {}, "2 pipeline stages"),
        ("llama", {}, {"dp": 2, "data_parallel": "ddp"}, {}, "DistributedDataParallel"),
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


@pytest.mark.parametrize(("gas", "ramp"), [(1, None), (2, None), (2, f"{2 * SEQ}:{12 * SEQ}")])
def test_an_engine_that_replays_trains_as_one_that_does_not(
    gas: int, ramp: str | None, stand_in: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay writes to the addresses of the capture: rows, gradients, losses. The six steps of the ramp are not captured."""
    monkeypatch.setattr(CUDAGraphRunner, "_capture", _record)

    def engine(use_graph: bool) -> Engine:
        monkeypatch.setattr(selection, "choose", lambda *_: Kernels(single_microbatch=gas == 1, cuda_graphs=use_graph))
        training = training_of(steps=8 + first, graphs="always", batch_ramp=ramp)
        return engine_of(job_of("llama"), Layout(gas=gas, mbs=2), training)

    first = 6 if ramp else 0
    plain, ours = engine(use_graph=False), engine(use_graph=True)
    assert ours.ramp.end == first
    for step in range(8 + first):
        wanted, found = plain.step(step), ours.step(step)
        assert (found.loss, found.grad_norm) == (wanted.loss, wanted.grad_norm)
    assert ours.cuda_graphs is not None
    assert ours.cuda_graphs.used
    assert plain.evaluate(1) == ours.evaluate(1)


@pytest.mark.parametrize("zero", [1, 3])
def test_an_evaluation_leaves_no_parameters_gathered(zero: int) -> None:
    """A replayed step does not know of them, and the next evaluation would find those of an earlier step."""
    assert in_ranks(_all_sharded, job_of("llama"), Layout(dp=2, zero=zero), training_of(steps=1)) == [True, True]


def _all_sharded(engine: Engine) -> bool:
    engine.step(0)
    engine.evaluate(1)
    (chunk,) = engine.pipeline.chunks.values()
    return all(group.is_sharded for group in torch_private.fsdp_param_groups(chunk.gradients.module))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "zero": 3},
        {"dp": 2, "tp": 2, "zero": 3},
        {"dp": 4, "zero": 1, "gas": 2},
        {"dp": 2, "cp": 2, "context_parallel": "allgather"},
    ],
    ids=str,
)
def test_a_captured_rank_of_several_computes_what_a_launched_one_does(
    layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One GPU as rank 0 of a job whose other ranks do not exist: gathers repeat its own shards, scatters keep its own part."""
    keep_own_part(monkeypatch)
    wanted, found = (_losses_of_rank(Layout(mbs=2, **layout), graphs) for graphs in ("never", "always"))
    assert found == pytest.approx(wanted, rel=1e-4)


def keep_own_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11's `fake` group leaves the output of a reduce-scatter as it is: rank 0 takes its part of the input."""

    def keeping(inner: Any) -> Any:
        def outer(*args: Any, **kwargs: Any) -> Any:
            work = inner(*args, **kwargs)
            own, parts = (
                kwargs.get(name, args[min(place, len(args) - 1)] if args else None) for place, name in enumerate(NAMES)
            )
            own.copy_(parts.reshape(-1)[: own.numel()].view_as(own))
            return work

        return outer

    for owner, name in ((dist, "reduce_scatter_tensor"), (dist, "reduce_scatter_single"), (comm, "reduce_scatter_into")):
        if hasattr(owner, name):
            monkeypatch.setattr(owner, name, keeping(getattr(owner, name)))


NAMES = ("output", "input")


def _losses_of_rank(layout: Layout, graphs: Any) -> list[float]:
    """Losses, norms and an evaluation's loss after each step."""
    job = job_of("llama", batch_tokens=layout.batch_tokens(64), seq=64)
    with single_rank_world(0, layout.gpus):
        engine = engine_of(job, layout, training_of(steps=9, graphs=graphs), device="cuda:0")
        found = list[float]()
        for step in range(9):
            result = engine.step(step)
            found += [result.loss, result.grad_norm, engine.evaluate(1)]
        assert engine.cuda_graphs is None or engine.cuda_graphs.used is (graphs == "always")
        return found


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
