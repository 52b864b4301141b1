"""torch's pipelines of other programs, rehearsed: held to real processes, and figures worked out by hand."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining  # before processes fork
from torch.distributed.tensor._random import is_rng_supported_mesh
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from measure.test_foreign_programs import PROGRAMS, figures, real, rehearsed
from ultrascale.measure.foreign import gpu, run, torchtitan
from ultrascale.measure.foreign.pipeline import ASSUMED
from ultrascale.measure.foreign.request import COMPILED, ForeignRehearsal, ForeignRequest
from ultrascale.measure.foreign.watcher import Watcher

SCRIPT = PROGRAMS / "pipeline.py"
ROWS, WIDTH, VOCAB, LAYERS = 64, 32, 128, 2
STATES = ROWS * WIDTH * 4
TOKENS = ROWS * 8
LINEAR = WIDTH * WIDTH + WIDTH
EMBEDDING, HEAD = VOCAB * WIDTH, VOCAB * WIDTH + VOCAB


def pipeline(folder: Path, ranks: int, rank: int, *arguments: str) -> ForeignRehearsal:
    return rehearsed(folder, ForeignRequest(str(SCRIPT), ranks, rank, arguments=arguments, steps=3))


def sent(found: ForeignRehearsal) -> dict[tuple[str, str], tuple[int, int]]:
    return {(one.kind, one.where): (one.calls, one.bytes) for one in found.collectives}


def send_copies() -> None:
    """A send of gloo holds its tensor as long as somebody holds the send, which NCCL's do not: it gets another tensor."""
    plain = dist.isend

    @functools.wraps(plain)
    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            copy = tensor.clone()
        return plain(copy, *args, **kwargs)

    gpu.replace_everywhere([(plain, isend)])


CASES = [
    pytest.param("1F1B", 0, (), id="1F1B-0"),
    pytest.param("Interleaved1F1B", 1, ("shapes",), id="Interleaved1F1B-1-shapes"),
    *(
        pytest.param(name, rank, shapes, id=f"{name}-{rank}" + "-shapes" * bool(shapes), marks=pytest.mark.slow)
        for name, rank, shapes in (
            ("1F1B", 1, ()),
            ("1F1B", 1, ("shapes",)),
            ("GPipe", 1, ()),
            ("Interleaved1F1B", 0, ()),
            ("LoopedBFS", 1, ()),
            ("InterleavedZeroBubble", 1, ()),
            ("ZBVZeroBubble", 0, ()),
            ("DualPipeV", 1, ()),
        )
    ),
]


@pytest.mark.parametrize(("name", "rank", "shapes"), CASES)
def test_a_rehearsed_stage_does_what_a_real_one_does(name: str, rank: int, shapes: tuple[str, ...], tmp_path: Path) -> None:
    found = pipeline(tmp_path, 2, rank, name, "4", *shapes)
    assert (ASSUMED in found.notes) == (not shapes)
    assert figures(found) == figures(real(tmp_path, SCRIPT, 2, rank, (name, "4", *shapes), send_copies))


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages(tmp_path: Path) -> None:
    held = {(ranks, count): pipeline(tmp_path, ranks, 0, "1F1B", str(count)) for ranks, count in ((2, 4), (4, 4), (4, 9))}
    # Of each micro-batch: the embedding, the first layer's output, and the second's, which is sent.
    most = {key: found.most["activations"] - key[1] * TOKENS for key, found in held.items()}
    assert most[4, 4] - most[2, 4] == 2 * (LAYERS + 1) * STATES
    assert most[4, 4] == most[4, 9]
    # torch has a buffer for the gradient of each micro-batch of the step, in flight or not.
    assert held[4, 9].memory["buffers"] - held[4, 4].memory["buffers"] == 5 * STATES


def test_a_stage_by_hand(tmp_path: Path) -> None:
    """The second of four stages, which is built with shapes, in steps of six micro-batches."""
    found = pipeline(tmp_path, 4, 1, "1F1B", "6", "shapes")
    assert found.memory["parameters"] == 4 * LAYERS * LINEAR
    assert found.memory["buffers"] == 2 * 6 * STATES  # inputs from the first stage, and gradients from the third
    assert sent(found) == {
        ("send_recv", "forward"): (6, 6 * STATES),
        ("send_recv", "after backward"): (6, 6 * STATES),
    }
    matmul = 2 * ROWS * WIDTH * WIDTH
    assert found.flops == {"addmm": 6 * LAYERS * matmul, "mm": 2 * 6 * LAYERS * matmul}


@pytest.mark.slow
def test_the_last_stage_by_hand(tmp_path: Path) -> None:
    """It asks a process of the first stage's rank for the shapes of its inputs."""
    found = pipeline(tmp_path, 4, 3, "1F1B", "6")
    assert found.memory["parameters"] == 4 * (LAYERS * LINEAR + HEAD)
    assert found.memory["buffers"] == 6 * STATES
    assert sent(found) == {("send_recv", "after backward"): (6, 6 * STATES)}
    matmuls = 2 * ROWS * WIDTH * (LAYERS * WIDTH + VOCAB)
    assert found.flops == {"addmm": 6 * matmuls, "mm": 2 * 6 * matmuls}


STAGES = [  # of the debug model's six layers, in four stages of one, two, two and one: on each rank one stage or two
    ("1F1B", 4, 0, {("send_recv", "forward"): 8}, 1),
    ("1F1B", 4, 2, {("send_recv", "forward"): 8, ("send_recv", "after backward"): 8}, 2),
    ("Interleaved1F1B", 2, 7, {("send_recv", "forward"): 8, ("send_recv", "after backward"): 16}, 3),
]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "pp", "rank", "sends", "layers"), STAGES)
def test_torchtitan(schedule: str, pp: int, rank: int, sends: dict[tuple[str, str], int], layers: int) -> None:
    """Its debug model: hidden states of 2048 tokens and 256 channels in bf16 are sent, and layers are compiled."""
    pytest.importorskip("torchtitan")
    degrees = f"--parallelism.pipeline_parallel_degree={pp}", f"--parallelism.pipeline_parallel_schedule={schedule}"
    arguments = ("--training.disable_cuda_graphs", *degrees)
    found = run.rehearse_foreign(ForeignRequest("llama3:llama3_debugmodel", 8, rank, "torchtitan", arguments))
    assert {ASSUMED, COMPILED} <= set(found.notes)
    states = 2048 * 256 * 2
    piped = {key: value for key, value in sent(found).items() if key[0] == "send_recv"}
    assert piped == {key: (calls, calls * states) for key, calls in sends.items()}
    attention = 3 * (2 * 2 * 16 * 2048 * 2048 * 16) // 2  # one sequence of 16 heads, the causal half, forward and backward
    assert found.flops["attention"] == 8 * layers * attention


class OnCpu(TorchDispatchMode):
    """Operators that name the GPU in a backward, where torch has no function modes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        given = dict(kwargs or {})
        return func(*args, **({**given, "device": gpu.on_cpu(given["device"])} if "device" in given else given))


def on_gloo(request: ForeignRequest, watcher: Watcher) -> None:
    """torchtitan takes the CPU for a GPU."""
    init = dist.init_process_group
    gpu.replace_everywhere([(init, lambda *_, **__: init("gloo")), (is_rng_supported_mesh, lambda _: False)])
    gpu.answer_for_gpu(request.rank, request.world, lambda: (0, 0))
    with gpu.GpuOnCpu(), OnCpu():
        torchtitan.run(request, watcher, lambda *_: None)


def attention_of_cpu(*args: Any) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args[:-1], scale=args[-1])[:2]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_torchtitan_s_stages_do_what_its_processes_do(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own Trainer in two processes on gloo, with a CPU's kernels here and there."""
    pytest.importorskip("torchtitan")
    monkeypatch.setattr(gpu, "_kernel", attention_of_cpu)
    monkeypatch.setattr(gpu, "fused_rms_norm_on_cpu", lambda: None)
    config, piped = PROGRAMS / "titan.py:plan", ("--parallelism.pipeline_parallel_degree=2",)
    with torch.compiler.set_stance("force_eager"):
        one = figures(rehearsed(tmp_path, ForeignRequest(str(config), 2, rank, "torchtitan", piped, steps=3)))
        other = figures(real(tmp_path, config, 2, rank, piped, send_copies, on_gloo))
    other["memory"]["buffers"] -= 2 * 4  # the mesh's tensor of ranks, which has values in a rehearsal too
    for each in one, other:  # a group of all ranks has another name
        each["collectives"] = [call[1:] for call in each["collectives"]]
    assert one == other


NARROW = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
dist.init_process_group("nccl")
rank = dist.get_rank()
stage = PipelineStage(nn.Linear(2 ** (4 - rank), 2 ** (3 - rank)), rank, 4, torch.device("cuda"))
schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, target: out.sum())
schedule.step(*([torch.zeros(8, 16)] if rank == 0 else []), target=torch.zeros(8))
"""


@pytest.mark.slow
def test_stages_that_send_other_shapes_need_them(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(NARROW)
    with pytest.raises(KeyError):
        rehearsed(tmp_path, ForeignRequest(str(script), 4, 1))
    refused = json.loads((tmp_path / run.RESULT).read_text())["refused"]
    assert refused.startswith("the pipeline's stage 1 sends [4, 4] in float32, but the first stage sends [4, 8] in float32")
    assert refused.endswith("give each PipelineStage its input_args and output_args")
