"""Programs that are not ours, rehearsed: figures worked out by hand and of real processes; programs that fail."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed.fsdp  # before processes fork

from ultrascale.measure.foreign import child, run
from ultrascale.measure.foreign.request import BALANCED, COMPILED, NOT_COMPILED, ForeignRehearsal, ForeignRequest
from ultrascale.measure.foreign.watcher import Watcher
from ultrascale.specs.errors import RunError, SpecError

PROGRAMS = Path(__file__).with_name("foreign")
FORK = multiprocessing.get_context("fork")


def in_processes(*targets: Callable[[], None], code: int = 0) -> None:
    """Each in a fork of this process: a rehearsal replaces functions of torch, and counts the modules that it finds."""

    def without_objects_of_the_parent(target: Callable[[], None]) -> None:
        gc.freeze()
        target()

    processes = [FORK.Process(target=without_objects_of_the_parent, args=(target,)) for target in targets]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        assert process.exitcode == code


def rehearsed(folder: Path, request: ForeignRequest) -> ForeignRehearsal:
    """Without the start of an interpreter, which takes seconds."""
    (folder / run.REQUEST).write_text(json.dumps(request.to_json()))

    def target() -> None:
        os.environ.update(request.environment | run.QUIET)
        child.main(folder)

    in_processes(target)
    return ForeignRehearsal.of_json(json.loads((folder / run.RESULT).read_text()))


def real(
    folder: Path,
    script: Path,
    world: int,
    of: int = 0,
    arguments: tuple[str, ...] = (),
    prepare: Callable[[], Any] = lambda: None,
    program: Callable[[ForeignRequest, Watcher], Any] = lambda request, _: runpy.run_path(request.program, run_name="__main__"),
) -> ForeignRehearsal:
    """Rank `of` of the same program in real processes on gloo, watched through the same step."""

    def rank_of(rank: int) -> Callable[[], None]:
        request = ForeignRequest(str(script), world, rank, arguments=arguments, steps=3)

        def done(watcher: Watcher) -> None:
            found = child._result(request, watcher, ())
            (folder / f"real{rank}.json").write_text(json.dumps(child.asdict(found)))

        def target() -> None:
            torch.set_num_threads(1)
            port = {"MASTER_PORT": str(20000 + os.getppid() % 20000)}
            os.environ.update(request.environment | port)
            sys.argv = [str(script), *arguments]
            prepare()
            with Watcher(None, request.steps, done) as watcher:
                program(request, watcher)

        return target

    in_processes(*map(rank_of, range(world)))
    return ForeignRehearsal.of_json(json.loads((folder / f"real{of}.json").read_text()))


def figures(found: ForeignRehearsal) -> dict[str, Any]:
    return {
        "flops": found.flops,
        "memory": {owner: size for owner, size in found.memory.items() if size},
        "collectives": [(one.technique, one.kind, one.where, one.group, one.calls, one.bytes) for one in found.collectives],
        "moment": found.moment,
    }


@pytest.mark.parametrize(("name", "world"), [("ddp.py", 2), ("fsdp_tp.py", 4), ("tp_logits.py", 2)])
def test_a_rehearsed_program_does_what_real_processes_do(name: str, world: int, tmp_path: Path) -> None:
    """In step 3: torch's DDP rebuilds its buckets in the second."""
    script = PROGRAMS / name
    one, other = rehearsed(tmp_path, ForeignRequest(str(script), world, steps=3)), real(tmp_path, script, world)
    if name != "ddp.py":
        other.memory["buffers"] -= world * 4  # the mesh's tensor of ranks, which has values in a rehearsal too
    assert figures(one) == figures(other)


def test_ddp_by_hand(tmp_path: Path) -> None:
    found = rehearsed(tmp_path, ForeignRequest(str(PROGRAMS / "ddp.py"), 64, rank=8, arguments=("foreach",)))
    sizes = 256 * 1024 + 1024, 1024 * 256 + 256, 256 * 512 + 512
    weights = 4 * sum(sizes)
    assert found.memory == {
        "parameters": weights,
        "gradients": weights,
        "optimizer": 2 * weights + 6 * 4,  # and the count of steps of each of six tensors
        "buffers": weights,  # DDP's buckets
        "activations": weights + 32 * 256 * 4 + 4,  # square roots of all second moments at once; the batch; the loss
    }
    assert (found.moment, found.peak) == ("optimizer", sum(found.memory.values()))
    # The first bucket is closed by the weight with which it reaches 1 MiB, the second layer's.
    [one] = found.collectives
    assert (one.technique, one.kind, one.where, one.group, one.calls) == ("world", "all_reduce", "backward", 64, 2)
    assert one.bytes == 2 * 63 / 64 * weights
    macs = [32 * inner * outer for inner, outer in ((256, 1024), (1024, 256), (256, 512))]
    assert found.flops == {"addmm": 2 * sum(macs), "mm": 2 * sum(macs) + 2 * sum(macs[1:])}


def test_fsdp_and_tp_by_hand(tmp_path: Path) -> None:
    found = rehearsed(tmp_path, ForeignRequest(str(PROGRAMS / "fsdp_tp.py"), 4, rank=1))
    layer, head, states = 2 * 64 * 128 * 4, 64 * 128 * 4, 16 * 64 * 4  # bytes; a layer's two matrices are halved by tp
    half = (2 * layer + head) // 2
    assert (found.memory["parameters"], found.most["gradients"]) == (half, half)
    assert found.memory["optimizer"] == 2 * half + 5 * 4
    assert found.moment == "backward, layers.0"
    matmul = 2 * 16 * 64 * 128  # all five are this large on a rank; the first needs no gradient of its input
    assert found.flops == {"mm": (3 * 5 - 1) * matmul}
    assert [(one.technique, one.kind, one.where, one.calls, one.bytes) for one in found.collectives] == [
        ("dp", "all_gather", "forward", 3, half),
        ("dp", "reduce_scatter", "backward", 3, half),
        ("dp", "all_gather", "backward", 2, layer),  # the root stays gathered
        ("tp", "all_reduce", "forward", 2, 2 * states),
        ("tp", "all_reduce", "backward", 1, states),
    ]


def test_logits_are_gathered_once(tmp_path: Path) -> None:
    found = rehearsed(tmp_path, ForeignRequest(str(PROGRAMS / "tp_logits.py"), 2))
    logits = 64 * 1024 * 4
    # Half of them as they are computed, those of both ranks as they arrive, and the same in the order of the vocabulary.
    assert found.memory["activations"] == logits // 2 + logits + logits + 64 * 8 * 4
    assert found.moment == "forward"


VALUES = """
import torch, torch.distributed as dist
from torch.utils.data import DataLoader
dist.init_process_group()
assert (dist.get_rank(), dist.get_world_size(), torch.cuda.current_device()) == (9, 16, 1)
torch.cuda.synchronize()
with torch.cuda.stream(torch.cuda.Stream()):
    pass
model = torch.nn.Linear(8, 8).cuda().to(torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(1.0).item())
assert torch.compile(torch.nn.RMSNorm(8)).cuda().to(torch.bfloat16).weight.dtype is torch.bfloat16
scaler = torch.amp.GradScaler()
objects = [None] * 16
dist.all_gather_object(objects, dist.get_rank())
assert objects == [9] * 16
for _ in DataLoader(torch.zeros(64, 8), batch_size=4, num_workers=2, pin_memory=True):
    x = torch.randn(4, 8, device="cuda:1", dtype=torch.bfloat16)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(x)
    with torch.autocast("cuda", dtype=torch.float32):
        assert model(x).dtype is torch.float32
    chosen = out[out > 0]
    assert chosen.shape == (32,)
    assert torch.nonzero(out).shape == (32, 2)
    assert torch.histc(torch.zeros(4, dtype=torch.int64, device="cuda"), bins=3, max=3).dtype is torch.int64
    assert (out.sum().item(), int((out > 0).sum()), bool(out.sum() > 3)) == (0.0, 0, False)
    q = torch.randn(1, 4, 16, 8, device="cuda", requires_grad=True)
    k = torch.randn(1, 2, 16, 8, device="cuda", requires_grad=True)
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
    scaler.scale(chosen.sum() + mixed.sum()).backward()
    assert k.grad.shape == k.shape
    scaler.step(optimizer)
    scaler.update()
    assert torch.cuda.max_memory_allocated() > 0
"""


def test_what_a_program_asks_of_a_gpu_is_answered(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(VALUES)
    found = rehearsed(tmp_path, ForeignRequest(str(script), 16, rank=9))
    # attention: q·k and p·v of 16 by 16 and 4 heads of 8, the causal half; twice that in backward
    assert found.flops["attention"] == 3 * (2 * 2 * 4 * 16 * 16 * 8) // 2
    assert found.memory["parameters"] == (64 + 8) * 2


NORM = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
norm = torch.nn.RMSNorm(64).cuda().to(torch.bfloat16)
optimizer = torch.optim.SGD(norm.parameters())
for _ in range(2):
    x = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    before = torch.cuda.memory_allocated()
    out = norm(x)
    allocated = torch.cuda.memory_allocated() - before
    assert allocated == out.nbytes + 16 * 4, allocated
    out.sum().backward()
    assert x.grad.dtype is norm.weight.grad.dtype is torch.bfloat16
    del out
    optimizer.step()
"""


def test_a_norm_saves_its_input_and_a_number_for_each_row(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(NORM)
    assert rehearsed(tmp_path, ForeignRequest(str(script), 1)).memory["parameters"] == 64 * 2


ROUTED = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
router = torch.nn.Linear(8, 4, bias=False).cuda()
experts = torch.nn.Parameter(torch.zeros(8, 8, device="cuda"))
optimizer = torch.optim.SGD([*router.parameters(), experts])
for _ in range(2):
    x = torch.randn(6, 8, device="cuda")
    scores, chosen = router(x).topk(3)
    sent = chosen.flatten().bincount(minlength=4).tolist()
    received = torch.empty(4, dtype=torch.int64, device="cuda").tolist()
    rows = torch.empty(sum(received), 8, device="cuda")
    dist.all_to_all_single(rows, x.repeat(3, 1), received, sent)
    assert sent == received == [5, 5, 4, 4], sent
    ((rows @ experts).sum() * scores.sum()).backward()
    optimizer.step()
"""


def test_experts_are_chosen_equally_often(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ROUTED)
    found = rehearsed(tmp_path, ForeignRequest(str(script), 4))
    assert BALANCED in found.notes
    [one] = found.collectives
    assert (one.kind, one.calls, one.bytes) == ("all_to_all", 1, 6 * 3 * 8 * 4 * 3 // 4)


FORCED = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
router = torch.nn.Linear(8, 4, bias=False).cuda()
optimizer = torch.optim.SGD(router.parameters())
@torch.compile(fullgraph=True)
def route(scores):
    _, chosen = scores.topk(3)
    chosen = (torch.arange(18, device="cuda") % 4).view(6, 3)
    return scores.gather(1, chosen).sum(), torch.histc(chosen, bins=4, min=0, max=4)
for _ in range(2):
    loss, counts = route(router(torch.randn(6, 8, device="cuda")))
    assert (counts.dtype, counts.tolist()) == (torch.int64, [5, 5, 4, 4]), counts.tolist()
    loss.backward()
    optimizer.step()
"""


def test_rows_of_experts_that_compiled_code_counts(tmp_path: Path) -> None:
    """It has no topk: nothing reads what it selects."""
    script = tmp_path / "train.py"
    script.write_text(FORCED)
    assert {COMPILED, BALANCED} <= set(rehearsed(tmp_path, ForeignRequest(str(script), 4)).notes)


def saved_in_process(file: Path, backend: str) -> int:
    """What a real run of compiled.py saves for backward."""
    environment = ForeignRequest("", 1).environment | {"MASTER_PORT": str(20000 + os.getpid() % 20000)}
    command = [sys.executable, str(PROGRAMS / "compiled.py"), str(file), backend, "no"]
    subprocess.run(command, env=os.environ | environment, check=True)
    return int(file.read_text())


@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_code_saves_what_a_real_run_of_it_saves(backend: str, tmp_path: Path) -> None:
    file, tokens, width, inner = tmp_path / "saved", 32, 8, 24
    found = rehearsed(tmp_path, ForeignRequest(str(PROGRAMS / "compiled.py"), 1, arguments=(str(file), "inductor", "yes")))
    assert COMPILED in found.notes
    # A block: one number per token and its states of the norm; gate and up, which silu and the product are computed from
    # again; and the product, which a GEMM of backward reads. The second block's input is the first one's output.
    block = tokens * (1 + width + 3 * inner)
    assert int(file.read_text()) == 4 * (2 * block + tokens * width)
    assert saved_in_process(file, backend) == 4 * (2 * block + tokens * width)


def test_compiled_blocks_with_tensor_parallelism_are_recomputed(tmp_path: Path) -> None:
    found = rehearsed(tmp_path, ForeignRequest(str(PROGRAMS / "compiled_tp.py"), 2))
    assert COMPILED in found.notes
    forward = 2 * 2 * 32 * 32 * 16 // 2 // 2  # q·k and p·v of 32 tokens and half of 16 channels, the causal half
    assert found.flops["attention"] == 2 * (1 + 1 + 2) * forward  # two blocks, each forward twice


@pytest.mark.slow
def test_a_program_that_cannot_be_captured_runs_without_torch_compile(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNCAPTURED)
    found = run.rehearse_foreign(ForeignRequest(str(script), 1))
    assert NOT_COMPILED in found.notes
    assert COMPILED not in found.notes


UNCAPTURED = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
@torch.compile(fullgraph=True)
def loss(x):
    if torch.compiler.is_compiling():
        raise NotImplementedError
    return model(x).sum()
for _ in range(2):
    loss(torch.randn(4, 8, device="cuda")).backward()
    optimizer.step()
"""


TORCHTITAN = [
    ("llama3:llama3_debugmodel", (), {"tp": 2}),
    ("deepseek_v3:deepseek_v3_debugmodel", ("--training.disable_cuda_graphs",), {"ep": 4}),
    ("llama3:llama3_debugmodel", (), {"cp": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "more", "degrees"), TORCHTITAN, ids=["tensor", "experts", "context"])
def test_torchtitan(config: str, more: tuple[str, ...], degrees: dict[str, int]) -> None:
    """Its debug models on 8 ranks: weights and states are shards of all parameters, and each technique communicates."""
    pytest.importorskip("torchtitan")
    long = {"tp": "tensor", "ep": "expert", "cp": "context"}
    arguments = [f"--parallelism.{long[name]}_parallel_degree={degree}" for name, degree in degrees.items()]
    found = run.rehearse_foreign(ForeignRequest(config, 8, engine="torchtitan", arguments=(*arguments, *more)))
    assert found.engine is not None
    assert found.engine.startswith("torchtitan 0.3")
    weights = found.memory["parameters"]
    assert 2 * weights <= found.memory["optimizer"] < 2.01 * weights + 4096  # and a count of steps for each tensor
    [(technique, size)] = degrees.items()
    head = 4 * 2048 * 256  # whole in fp32, which a dense model's chunks of the loss add to; of tp a part
    assert found.most["gradients"] == weights + {"tp": head // 2, "ep": 0, "cp": head}[technique]
    assert {one.group for one in found.collectives if one.technique == technique} == {size}
    assert {"mm", "attention"} <= set(found.flops)
    if technique == "cp":  # keys and values of six layers are gathered, again in backward, and their gradients reduced
        calls = {(one.kind, one.where): one.calls for one in found.collectives if one.technique == "cp"}
        assert calls == {("all_gather", "forward"): 12, ("all_gather", "backward"): 12, ("reduce_scatter", "backward"): 12}


ENDINGS = {
    "crash": ("print('line'); raise ValueError('of the program')", "exit code 1", "ValueError: of the program"),
    "exit": ("raise SystemExit(3)", "exit code 3", ""),
    "killed": ("import os; os.kill(os.getpid(), 9)", "ended by signal 9", ""),
    "hang": ("import time; print('waiting', flush=True); time.sleep(60)", "try a longer --timeout", "waiting"),
    "flood": ("while True: print('x' * 1000)", "try a longer --timeout", "xxx"),
    "ended": ("", "never called torch.distributed.init_process_group", ""),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_that_fails_is_one_sentence(ending: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program, says, last = ENDINGS[ending]
    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.setattr(run, "CHILD", (sys.executable, "-c", program))
    with pytest.raises(RunError) as failed:
        run.rehearse_foreign(ForeignRequest(str(script), 8), timeout_s=1.5)
    sentence, *lines = str(failed.value).splitlines()
    assert sentence.startswith(str(script))
    assert says in sentence
    assert sentence.endswith(":") == (bool(lines) and "exit code" in says)
    assert len(lines) <= run.SHOWN_LINES
    assert last in "".join(lines[-1:])


def test_a_program_that_steps_without_a_process_group_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nw = torch.nn.Parameter(torch.ones(1))\noptimizer = torch.optim.SGD([w])\n"
        "for _ in range(3):\n    w.sum().backward()\n    optimizer.step()\n"
    )
    (tmp_path / run.REQUEST).write_text(json.dumps(ForeignRequest(str(script), 8).to_json()))
    in_processes(lambda: child.main(tmp_path))
    assert json.loads((tmp_path / run.RESULT).read_text()) == {"initialised": False}


def test_a_program_without_enough_steps_is_one_sentence(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    for text, initialised in (("import torch", False), ("import torch.distributed as d; d.init_process_group()", True)):
        script.write_text(text)
        request = ForeignRequest(str(script), 8)
        (tmp_path / run.REQUEST).write_text(json.dumps(request.to_json()))
        in_processes(lambda: child.main(tmp_path))
        found = json.loads((tmp_path / run.RESULT).read_text())
        (tmp_path / run.RESULT).unlink()  # else the next program's would be the same
        assert found == {"initialised": initialised, "steps": 0}
    assert "ended after 0 optimizer steps and 2 are needed" in run._sentence(request, found, 0, 1)


REFUSED = [
    (ForeignRequest("none.py", 8), "--script is 'none.py', which is not a file"),
    (ForeignRequest(__file__, 8, rank=8), "--rank is 8 but --world has ranks 0 to 7"),
    (ForeignRequest(__file__, 8, steps=1), "--steps is 1 .* try 2"),
    (ForeignRequest("x:y", 8, engine="torchtitn"), "did you mean 'torchtitan'"),
]


@pytest.mark.parametrize(
    ("version", "config", "says"),
    [
        ("0.3.0", __file__.replace(".py", ".toml"), "which torchtitan 0.2 reads, and 0.3.0 is installed"),
        ("0.2.2", f"{__file__}:plan", "torchtitan 0.2.2 reads TOML"),
        ("0.3.0", "llama3", "name a file or a function, such as config.py:plan"),
        ("0.3.0", "none.py:plan", "--config is 'none.py', which is not a file"),
        (None, "llama3:llama3_8b", "which is not installed: try pip install 'torchtitan==0.3.0'"),
    ],
)
def test_configurations_go_with_versions(version: str | None, config: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    with pytest.raises(SpecError, match=says):
        ForeignRequest(config, 8, engine="torchtitan").checked()


def test_a_version_that_was_not_tested_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.4.1")
    [note] = ForeignRequest("llama3:llama3_8b", 8, engine="torchtitan").checked().notes
    assert note == "torchtitan 0.4.1 was not tested; 0.2.2 and 0.3.0 were"


@pytest.mark.parametrize(("request_", "says"), REFUSED, ids=[says[:20] for _, says in REFUSED])
def test_bad_requests_are_refused(request_: ForeignRequest, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        request_.checked()
