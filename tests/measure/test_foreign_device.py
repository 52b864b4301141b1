"""Programs rehearsed as on a real GPU, with real tensors on the CPU and an allocator of the test's own."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed.fsdp  # before processes fork
from rich.console import Console
from torch.nn import functional

from measure.test_foreign_engines import TINY, rehearsed_plan, request_of
from measure.test_foreign_programs import PROGRAMS, figures, in_processes, rehearsed
from ultrascale.measure.foreign import child, device, gpu, peers, run
from ultrascale.measure.foreign.compare import ForeignReport
from ultrascale.measure.foreign.request import ForeignRehearsal, ForeignRequest
from ultrascale.measure.rehearse import Collective
from ultrascale.show import foreign as show
from ultrascale.specs.blocks import MoE
from ultrascale.specs.errors import RunError, SpecError

PEAKS = (900, 100, 300, 200, 800)
"""of steps; the first creates states, and the last is only counted"""


def rehearsed_on_gpu(folder: Path, request: ForeignRequest, code: int = 0, in_name_only: bool = False) -> ForeignRehearsal:
    """On a machine without CUDA. `code`: the exit code of the process. `in_name_only`: what names the GPU gets the CPU."""
    (folder / run.REQUEST).write_text(json.dumps(request.to_json()))
    peaks = iter(PEAKS[1:])

    def target() -> None:
        os.environ.update(request.environment)
        torch.set_num_threads(1)
        if in_name_only:
            gpu.attention, gpu.fused_rms_norm_on_cpu = functional.scaled_dot_product_attention, lambda: None  # type: ignore[assignment]
            gpu.answer_for_gpu(0, 1, lambda: (0, 0))
            peers._meshes_with_values()
            torch.compiler.set_stance("force_eager")
            torch.cuda.default_generators = defaultdict(lambda: torch.default_generator)  # type: ignore[assignment]
            if request.engine == "megatron":  # it asks in a backward too, and makes arrays of a GPU's tensors
                torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
                dispatchers: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
                dispatchers.maybe_move_tensor_to_cpu = lambda one, as_numpy=False, **_: (
                    one.numpy() if as_numpy and isinstance(one, torch.Tensor) else one
                )
            kind = torch.Tensor.type
            torch.Tensor.type = lambda *args: "torch.cuda." + str(kind(*args)).rpartition(".")[2]  # type: ignore[assignment,method-assign]
        torch.cuda.max_memory_allocated = lambda: next(peaks)  # type: ignore[assignment]
        torch.cuda.reset_peak_memory_stats = torch.cuda.synchronize = lambda: None  # type: ignore[assignment]
        torch.cuda.get_device_name = lambda: "a GPU"  # type: ignore[assignment]
        with gpu.GpuOnCpu() if in_name_only else nullcontext():
            child.main(folder)

    in_processes(target, code=code)
    return ForeignRehearsal.of_json(json.loads((folder / run.RESULT).read_text()))


def on_gpu(script: Path, world: int) -> ForeignRequest:
    return ForeignRequest(str(script), world, device="cuda", steps=len(PEAKS))


def test_a_gpu_counts_what_tensors_without_memory_do(tmp_path: Path) -> None:
    """The same FLOPs and collectives, forward and backward; the peak is the allocator's."""
    script = PROGRAMS / "fsdp_tp.py"
    found = rehearsed_on_gpu(tmp_path, on_gpu(script, 4))
    without = rehearsed(tmp_path, ForeignRequest(str(script), 4))
    assert {name: figures(found)[name] for name in ("flops", "collectives")} == {
        name: figures(without)[name] for name in ("flops", "collectives")
    }
    assert (found.peak, found.memory, found.step, found.gpu) == (300, {}, 5, "a GPU")
    assert found.step_s is not None
    assert found.step_s > 0
    assert {device.ALLOCATOR, device.COUNTED} <= set(found.notes)
    assert device.VALUES not in found.notes


ENGINES_ON_GPU = [
    ("accelerate", {"dp": 8, "zero": 3, "mbs": 2, "gas": 2}),
    ("accelerate", {"dp": 8}),
    ("deepspeed", {"dp": 8, "zero": 1}),
    ("deepspeed", {"dp": 8, "zero": 2, "gas": 2}),
    ("deepspeed", {"dp": 8, "zero": 3}),
    ("megatron", {"dp": 4, "tp": 2, "zero": 1, "gas": 2}),
    ("megatron", {"dp": 8, "ep": 4, "zero": 1, "dispatcher": "alltoall"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "layout"), ENGINES_ON_GPU, ids=lambda one: one if isinstance(one, str) else "")
def test_engines_run_with_values_as_they_do_without(engine: str, layout: dict[str, Any], tmp_path: Path) -> None:
    """The same FLOPs and collectives, of real tensors on the CPU that engines take for a GPU's."""
    pytest.importorskip("megatron.core" if engine == "megatron" else engine)
    model = TINY.model_copy(update={"moe": MoE(experts=8, top_k=2, expert_ffn=32)}) if "ep" in layout else TINY
    without = rehearsed_plan(tmp_path, engine, model, **layout)
    request = request_of(tmp_path, engine, model, **layout)
    found = rehearsed_on_gpu(tmp_path, replace(request, device="cuda", steps=len(PEAKS)), in_name_only=True)
    assert (found.peak, found.step, found.step_s is not None) == (300, 5, True)
    assert device.COUNTED in found.notes
    assert found.flops["mm"] == without.flops["mm"]  # of experts' rows, which are random there, they differ
    experts = found.flops.get("_grouped_mm", 0), without.flops.get("_grouped_mm", 0)
    assert experts[0] == pytest.approx(experts[1], rel=0.5)
    assert sent(found) == sent(without)


def sent(found: ForeignRehearsal) -> dict[tuple[str, str], tuple[int, int]]:
    """Calls and bytes, by kind and group, without those of experts."""
    kinds: defaultdict[tuple[str, str], list[Collective]] = defaultdict(list)
    for one in found.collectives:
        if one.kind != "all_to_all":
            kinds[one.technique, one.kind].append(one)
    return {kind: (sum(one.calls for one in alike), sum(one.bytes for one in alike)) for kind, alike in kinds.items()}


FAILS = """
import torch, torch.distributed as dist
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
dist.init_process_group("nccl")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(9):
    if is_in_torch_dispatch_mode():
        raise MemoryError
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
"""


def test_a_peak_is_kept_if_the_step_that_counts_fails(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILS)
    found = rehearsed_on_gpu(tmp_path, on_gpu(script, 1), code=1)
    assert (found.peak, found.flops, found.collectives) == (300, {}, ())
    assert device.NOT_COUNTED in found.notes
    assert device.COUNTED not in found.notes


COMPILED = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters())
calls = []
def backend(graph, _):
    def run(*args):
        calls.append(1)
        return graph(*args)
    return run
model.forward = torch.compile(model.forward, backend=backend, fullgraph=True)
for step in range(5):
    model(torch.randn(4, 8)).sum().backward()
    assert len(calls) == min(step + 1, 4)
    optimizer.step()
"""


def test_compiled_code_runs_in_every_step_that_is_measured(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(COMPILED)
    found = rehearsed_on_gpu(tmp_path, on_gpu(script, 1))
    assert found.flops == {"addmm": 2 * 4 * 8 * 8, "mm": 2 * 4 * 8 * 8}


ROWS = """
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional
dist.init_process_group("nccl")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(5):
    sent = torch.tensor([3, 5])
    assert functional.all_to_all_single(sent, None, None, dist.group.WORLD).tolist() == [3, 5]
    received = torch.full((2,), 1000)
    dist.all_to_all_single(received, sent)
    assert received.tolist() == [3, 5]
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
"""


def test_ranks_receive_as_many_rows_as_they_send(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ROWS)
    found = rehearsed_on_gpu(tmp_path, on_gpu(script, 2))
    assert {(one.kind, one.calls, one.bytes) for one in found.collectives} == {("all_to_all", 2, 16)}


def test_what_a_gpu_gives_is_shown(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ROWS)
    found = rehearsed_on_gpu(tmp_path, on_gpu(script, 2))
    console = Console(width=80, record=True)
    show.show(console, ForeignReport(ForeignRequest(str(script), 2), found, None))
    text = console.export_text()
    assert "allocator's peak: 0.29 KiB; a step computes for" in text
    assert "owner" not in text.replace("memory by owner", "")
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (ForeignRequest(__file__, 8, device="cuda"), "--steps is 2 but on a GPU the last step is not measured.*: try 10"),
        (ForeignRequest(__file__, 8, device="gpu"), "--device is 'gpu' .*: try meta"),
    ],
)
def test_bad_requests_are_refused(request_: ForeignRequest, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        request_.checked()


def test_without_cuda_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SpecError, match="--device is cuda but torch sees no GPU here: try --device meta"):
        run.rehearse_foreign(ForeignRequest(__file__, 8, device="cuda", steps=10))


def test_on_a_gpu_a_rank_is_alone_on_its_node() -> None:
    variables = ForeignRequest(__file__, 64, rank=9, device="cuda").environment
    assert (variables["LOCAL_RANK"], variables["LOCAL_WORLD_SIZE"], variables["RANK"]) == ("0", "1", "9")


def test_a_kernel_without_a_gpu_names_the_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    program = "raise RuntimeError('0 active drivers ([]). There should only be one: triton')"
    monkeypatch.setattr(run, "CHILD", (sys.executable, "-c", program))
    with pytest.raises(RunError, match=r"try --device cuda, on a machine that has one$"):
        run.rehearse_foreign(ForeignRequest(str(script), 8))
