"""Other engines, rehearsed on a tiny Llama: states and collectives are worked out by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from builders import make_job
from conftest import Run
from measure.test_foreign_programs import rehearsed
from ultrascale.cost.estimate import estimate
from ultrascale.export import targets, write
from ultrascale.measure.foreign.request import ENGINES, ForeignEngine, ForeignRehearsal, ForeignRequest, arguments_of
from ultrascale.measure.foreign.run import rehearse_foreign
from ultrascale.specs.blocks import MoE
from ultrascale.specs.errors import SpecError
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.plan import Plan

TINY = Model(name="tiny", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=128)
LAYER = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64  # q and o, k and v, the MLP, two norms
EMBEDDING, NORM = 128 * 64, 64
ALL = 2 * LAYER + 2 * EMBEDDING + NORM
TENSORS = 2 * 9 + 3
SEQ = 32


def planned(framework: str, model: Model = TINY, **layout: Any) -> Plan:
    chosen = Layout(**layout)
    job = make_job(model, "8xh100", SEQ, chosen, framework)
    return Plan(job=job, layout=chosen, estimate=estimate(job, chosen))


def request_of(folder: Path, engine: str, model: Model = TINY, rank: int = 0, **layout: Any) -> ForeignRequest:
    plan = planned(ENGINES[engine].framework, model, **layout)
    exported = targets.engine_files(plan, engine, None, str(folder))
    write.into(folder, exported.files, force=True)
    config = str(folder / exported.checks[0].engine.config)
    return ForeignRequest(config, plan.layout.gpus, rank, engine=engine, arguments=arguments_of(plan))


def rehearsed_plan(folder: Path, engine: str, model: Model = TINY, rank: int = 0, **layout: Any) -> ForeignRehearsal:
    request = request_of(folder, engine, model, rank, **layout)
    # megatron-core compiles functions when it is imported, which another test may have done.
    return rehearse_foreign(request) if engine == "megatron" else rehearsed(folder, request)


def calls(found: ForeignRehearsal) -> dict[tuple[str, str], tuple[int, int]]:
    """Without the norm's few bytes."""
    return {(one.kind, one.where): (one.calls, one.bytes) for one in found.collectives if one.bytes > 1000}


@pytest.mark.slow
def test_accelerate_with_fsdp2(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    found = rehearsed_plan(tmp_path, "accelerate", dp=8, zero=3, mbs=2, gas=2)
    shard = ALL * 4 // 8
    assert found.memory["parameters"] == shard
    assert 4 * ALL <= found.most["gradients"] <= 4 * ALL + shard  # whole in fp32, between micro-batches
    assert found.memory["optimizer"] == 2 * shard + TENSORS * 4
    sent = 7 * 2 * 2 * ALL // 8  # in bf16, of two micro-batches
    tail = 7 * 2 * 2 * (EMBEDDING + NORM) // 8  # the last norm and the head stay gathered
    assert calls(found) == {  # groups: the embedding, each layer, the tail; gradients in fp32 after the last micro-batch
        ("all_gather", "forward"): (2 * 4, sent),
        ("all_gather", "backward"): (2 * 3, sent - tail),
        ("reduce_scatter", "backward"): (4, 7 * 4 * ALL // 8),
    }
    tokens = 2 * 2 * SEQ
    matmuls = 3 * 2 * tokens * (ALL - EMBEDDING - 5 * NORM)
    attention = 3 * 2 * (2 * 2 * 4 * 2 * 2 * SEQ * SEQ * 16) // 2
    assert found.flops == {"mm": matmuls, "attention": attention}


BUCKET = 2 * 500_000_000
"""bytes of the buffer in which DeepSpeed reduces gradients in bf16, by default"""


@pytest.mark.slow
def test_deepspeed_without_sharded_gradients(tmp_path: Path) -> None:
    """ZeRO-1 in bf16 keeps gradients in fp32 beside those of backward, and reduces them in bf16."""
    pytest.importorskip("deepspeed")
    found = rehearsed_plan(tmp_path, "deepspeed", dp=8, zero=1)
    assert found.memory["parameters"] == 2 * ALL + 4 * ALL // 8
    assert found.memory["optimizer"] == 2 * 4 * ALL // 8 + 4
    assert found.most["gradients"] == (2 + 4) * ALL
    assert calls(found) == {
        ("all_reduce", "after backward"): (1, 2 * 7 * 2 * ALL // 8),
        ("all_gather", "forward"): (1, 7 * 2 * ALL // 8),
    }


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_with_sharded_gradients(stage: int, tmp_path: Path) -> None:
    """In the second of two micro-batches. All tensors are smaller than those that ZeRO-3 does not keep gathered."""
    pytest.importorskip("deepspeed")
    found = rehearsed_plan(tmp_path, "deepspeed", dp=8, zero=stage, gas=2)
    gathered = 2 * ALL if stage == 2 else 2 * ALL + 2 * ALL // 8  # ZeRO-3 keeps shards beside them
    assert found.memory["parameters"] == gathered + 4 * ALL // 8
    assert found.memory["optimizer"] == 2 * 4 * ALL // 8 + 4
    assert found.most["gradients"] == BUCKET
    reduced = {("reduce_scatter", "after backward"): (2, 2 * 7 * 2 * ALL // 8)}
    if stage == 2:  # whole buckets; in the same group a byte for overflows and the norm
        reduced = {("all_reduce", "after backward"): (2 + 2, round(2 * 7 / 8 * (2 * 2 * ALL + 1 + 4)))}
    assert calls(found) == {
        **reduced,
        ("all_gather", "forward"): (1 if stage == 2 else TENSORS, 7 * 2 * ALL // 8),
    }
    assert found.flops["mm"] == 2 * 3 * 2 * SEQ * (ALL - EMBEDDING - 5 * NORM)


@pytest.mark.slow
def test_deepspeed_steps_in_parts(tmp_path: Path) -> None:
    """Its optimizer steps once for each sub-group of parameters, and once to create states: a step has all of them."""
    pytest.importorskip("deepspeed")
    request = request_of(tmp_path, "deepspeed", dp=8, zero=3)
    config = Path(request.program)
    settings = json.loads(config.read_text())
    settings["zero_optimization"]["sub_group_size"] = LAYER // 8
    config.write_text(json.dumps(settings))
    found = rehearsed(tmp_path, request)
    assert found.flops["mm"] == 3 * 2 * SEQ * (ALL - EMBEDDING - 5 * NORM)
    assert 0 < found.memory["optimizer"] - 2 * 4 * ALL // 8 <= 4 * TENSORS  # a count of steps for each part


@pytest.mark.slow
def test_megatron_with_tensor_parallelism_and_a_distributed_optimizer(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    found = rehearsed_plan(tmp_path, "megatron", dp=4, tp=2, zero=1, gas=2)
    norms = 5 * NORM
    held = -(-((ALL - norms) // 2 + norms) // 128) * 128  # matrices are halved, and the whole is padded for the optimizer
    assert found.memory["parameters"] == 2 * held + 4 * held // 4
    assert found.memory["gradients"] == 4 * held
    assert 0 <= found.memory["optimizer"] - 2 * held <= 4 * TENSORS
    part = SEQ * 64 * 2 // 2  # bytes that a rank sends of one micro-batch's hidden states
    gathers = 2 * (2 * 2 + 1)  # before qkv and the MLP of each layer and before the head, of two micro-batches
    sent = {(one.technique, one.kind, one.where): (one.calls, one.bytes) for one in found.collectives}
    assert sent == {
        ("dp", "reduce_scatter", "backward"): (1, 3 * held),
        ("dp", "all_gather", "forward"): (1, 3 * 2 * held // 4),
        ("optimizer", "all_reduce", "after backward"): (1, 2 * 7 * 4 // 8),
        ("tp", "all_gather", "forward"): (gathers, gathers * part),
        ("tp", "reduce_scatter", "forward"): (gathers, gathers * part),  # after o, the MLP and the embedding
        ("tp", "all_gather", "backward"): (2 * gathers, 2 * gathers * part),  # and again for weight gradients
        ("tp", "reduce_scatter", "backward"): (gathers, gathers * part),
        ("tp", "all_reduce", "forward"): (2 * 2, 2 * 3 * SEQ * 4),  # the loss: maxima, then sums and targets
        ("tp", "all_reduce", "after backward"): (1, 4 * norms),
    }
    matmuls = 3 * 2 * 2 * SEQ * (ALL - EMBEDDING - norms) // 2
    assert found.flops["mm"] == matmuls


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 7])
def test_megatron_with_virtual_stages(rank: int, tmp_path: Path) -> None:
    """Two stages of one layer on each of two ranks; the first has the embedding and the fourth the head."""
    pytest.importorskip("megatron.core")
    model = TINY.model_copy(update={"layers": 4})
    found = rehearsed_plan(
        tmp_path, "megatron", model, rank, dp=4, pp=2, zero=1, gas=4, schedule="interleaved", virtual_stages=2
    )
    held = [LAYER + EMBEDDING, LAYER] if rank == 0 else [LAYER, LAYER + EMBEDDING + NORM]
    padded = sum(-(-one // 128) * 128 for one in held)
    padding = padded - sum(held)  # in the part of the last of four ranks, which rank 7 is
    assert found.memory["parameters"] == 2 * padded + 4 * (padded // 4 - padding)
    sends = {one.where: (one.calls, one.bytes) for one in found.collectives if one.kind == "send_recv"}
    assert (sum(calls for calls, _ in sends.values()), sum(size for _, size in sends.values())) == (12, 12 * SEQ * 64 * 2)
    head = EMBEDDING if rank == 7 else 0
    assert found.flops["mm"] == 4 * 3 * 2 * SEQ * (2 * (LAYER - 2 * NORM) + head)


@pytest.mark.slow
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_megatron_with_experts(dispatcher: str, tmp_path: Path) -> None:
    """Two of eight experts on each of four ranks, and two are selected for each token; in grouped GEMMs."""
    pytest.importorskip("megatron.core")
    model = TINY.model_copy(update={"moe": MoE(experts=8, top_k=2, expert_ffn=32)})
    found = rehearsed_plan(tmp_path, "megatron", model, dp=8, ep=4, zero=1, dispatcher=dispatcher)
    rows, probability = SEQ * 2, 2
    assert found.flops["_grouped_mm"] == 2 * 3 * 3 * 2 * rows * 64 * 32
    attention, router = 2 * 64 * 64 + 2 * 64 * 32, 8 * 64
    assert found.flops["mm"] == 3 * 2 * SEQ * (2 * (attention + router) + EMBEDDING)
    sent = {(one.kind, one.where): (one.calls, one.bytes) for one in found.collectives if one.technique.startswith("ep")}
    if dispatcher == "alltoall":  # rows and their probabilities there, and rows back
        moved = 6, 2 * 3 * rows * (2 * 64 * 2 + probability) // 4
        assert (sent["all_to_all", "forward"], sent["all_to_all", "backward"]) == (moved, moved)
    else:  # the hidden states of all four ranks, summed on the way back
        states = 2 * 3 * SEQ * 64 * 2
        assert (sent["reduce_scatter", "forward"], sent["all_gather", "backward"]) == ((2, states), (2, states))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "layout", "says"),
    [
        ("accelerate", {"dp": 4, "tp": 2, "zero": 3, "sequence_parallel": False}, "parallelism_config_tp_size is 2"),
        ("accelerate", {"dp": 8, "zero": 3, "offload": "parameters"}, "fsdp_offload_params is true"),
        ("deepspeed", {"dp": 8, "zero": 2, "offload": "optimizer"}, "zero_optimization.offload_optimizer moves"),
        ("deepspeed", {"dp": 4, "tp": 2, "zero": 1, "sequence_parallel": False}, "tensor_parallel.autotp_size is 2"),
        ("megatron", {"dp": 4, "cp": 2, "zero": 1}, "--context-parallel-size is 2"),
    ],
)
def test_what_cannot_be_rehearsed_is_one_sentence(engine: str, layout: dict[str, Any], says: str, tmp_path: Path) -> None:
    pytest.importorskip(engine)
    with pytest.raises(KeyError):
        rehearsed(tmp_path, request_of(tmp_path, engine, **layout))
    refused = json.loads((tmp_path / "result.json").read_text())["refused"]
    assert refused.startswith(says)
    assert refused.endswith(("try 1", "try none", "try false"))


def test_other_optimizers_are_refused() -> None:
    plan = planned("accelerate", dp=8, zero=3)
    changed = Plan(job=plan.job.changed(optimizer="muon"), layout=plan.layout, estimate=plan.estimate)
    with pytest.raises(SpecError, match=r"job.optimizer is muon.* try adamw"):
        arguments_of(changed)


def test_engines_have_other_names(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ForeignEngine, "installed", lambda _: "1.15.0")
    config = tmp_path / "config.yaml"
    config.touch()
    for name in ("transformers", "fsdp", "accelerate"):
        assert ForeignRequest(str(config), 8, engine=name).checked() == ForeignRequest(str(config), 8, engine="accelerate")
    _, out, _ = run("rehearse", "--help")
    shown = set(re.findall(r"\w+", out))
    assert {name for one in ENGINES.values() for name in (one.name, *one.other_names)} <= shown


@pytest.mark.slow
@pytest.mark.parametrize("engine", list(ENGINES))
def test_the_command_shows_a_plan_beside_its_estimate(engine: str, run: Run, tmp_path: Path) -> None:
    pytest.importorskip(engine)
    model = Model.load("llama-3.2-1b") if engine == "torchtitan" else TINY  # it has flavors
    layouts = {"megatron": {"dp": 4, "tp": 2, "zero": 1}, "deepspeed": {"dp": 8, "zero": 1}}
    plan = planned(ENGINES[engine].framework, model, **layouts.get(engine, {"dp": 8, "zero": 3}))
    file = plan.save(tmp_path / "plan.yaml")
    code, out, err = run("rehearse", file, "--engine", engine, "--json", tmp_path / "found.json")
    assert (code, err) == (0, ""), err
    for row in ("weights", "gradients", "optimizer states", "activations, buffers", "FLOPs", "sent"):
        assert f"\n{row}" in out.partition("beside the estimate")[2]
    found = json.loads((tmp_path / "found.json").read_text())
    assert {"memory", "most", "flops", "collectives", "notes", "engine", "estimate"} <= set(found)
    terms = {one["label"]: one for one in found["estimate"]["terms"]}
    padding = 3 * 128 if engine == "megatron" else 0
    assert 0 <= terms["parameters"]["rehearsed"] - terms["parameters"]["predicted"] <= padding
    assert 0 <= terms["optimizer"]["rehearsed"] - terms["optimizer"]["predicted"] <= padding + 4 * 9 * 17  # counts of steps


@pytest.mark.slow
def test_the_command_runs_a_configuration(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("torchtitan")
    words = ("rehearse", "--engine", "torchtitan", "--config", "llama3:llama3_debugmodel", "--world", 8)
    code, out, err = run(*words, "--json", tmp_path / "found.json")
    assert (code, err) == (0, ""), err
    assert "rank 0 of 8: torchtitan" in out
    assert "beside the estimate" not in out
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["estimate"], found["program"]) == (None, "llama3:llama3_debugmodel")
