"""A rank rehearsed alone: what it holds and does, against counts by hand, against real tensors, and through the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ultrascale.cost.estimate import estimate
from ultrascale.measure import rehearse_tracker as operator_tracker
from ultrascale.measure import rehearse_world
from ultrascale.measure.rehearse import Rehearsal, check, compared, engine_of, prediction, ranks_of, rehearse, whole_gradients
from ultrascale.measure.rehearse_rank import ShortSchedule, cut, rehearse_rank, shorten
from ultrascale.measure.rehearse_world import QuickFakeTensorMode, split_evenly
from ultrascale.schedules import ActionKind, lint
from ultrascale.specs.blocks import MoE
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import GIB
from ultrascale.train import memory
from ultrascale.train.build import schedule_of

MODEL = Model(name="small", layers=4, hidden=64, heads=4, kv_heads=2, ffn=192, vocab=256)
EXPERTS = Model(
    name="experts", layers=4, hidden=64, heads=4, kv_heads=2, ffn=0, vocab=256, moe=MoE(experts=8, top_k=2, expert_ffn=96)
)
SEQ = 64


def job_and_layout(fields: dict[str, Any], model: Model = MODEL, precision: str = "bf16") -> tuple[Job, Layout]:
    layout = Layout(**fields)
    cluster = Cluster.load(f"{layout.gpus}xh100")
    tokens = layout.batch_tokens(SEQ)
    return Job(
        model=model, cluster=cluster, seq=SEQ, batch_tokens=tokens, precision=precision, framework=engine_of("eager")
    ), layout


def calls(one: Rehearsal, technique: str) -> dict[tuple[str, str], tuple[int, int]]:
    return {(each.kind, each.where): (each.calls, each.bytes) for each in one.collectives if each.technique == technique}


@pytest.mark.quick_cases(every=6)
@pytest.mark.parametrize(
    "fields",
    [
        {"dp": 2, "zero": 1, "gas": 3},
        {"dp": 2, "zero": 1},
        {"dp": 2, "zero": 2, "gas": 2},
        {"dp": 2, "zero": 3, "keep_gathered": True},
        {"dp": 2, "zero": 3, "gas": 2},
        {"dp": 2, "zero": 1, "pp": 2, "tp": 2, "gas": 4, "schedule": "zero-bubble"},
    ],
    ids=str,
)
def test_gpu_accounting_includes_transient_states(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its allocator knows no owners: gathered weights and earlier micro-batches' gradients count while they are there."""
    wanted = rehearse_rank(*job_and_layout(fields), rank=0).memory
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    for name in ("max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 2**40)
    monkeypatch.setattr(memory, "_by_storages", lambda engine, step, live: memory._by_allocator(engine, step))
    found = rehearse_rank(*job_and_layout(fields), rank=0).memory
    names = ("parameters", "master", "gradients", "optimizer")
    assert {name: getattr(found, name) for name in names} == {name: getattr(wanted, name) for name in names}


def test_a_model_on_one_rank_by_hand() -> None:
    one = rehearse_rank(*job_and_layout({"gas": 2}), rank=0)
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 192 + 2 * 64
    parameters = 4 * layer + 2 * 256 * 64 + 64
    assert one.memory.parameters == 2 * parameters
    assert (one.memory.master, one.memory.gradients, one.memory.optimizer) == (4 * parameters, 4 * parameters, 8 * parameters)
    matmuls = 2 * 64 * (2 * 64 + 2 * 32 + 3 * 192)  # a token's, in a layer: q, out, k, v; gate, up, down
    scores = 2 * 64 * (64 / 2) * 2  # q·k and p·v over the causal half of the sequence, 4 heads of 16
    assert one.flops == {"mm": 3 * 2 * 64 * (4 * matmuls + 2 * 64 * 256), "attention": 3 * 2 * 64 * 4 * scores}
    assert one.collectives == ()
    assert one.moment == "backward of micro-batch 0, the head and the loss"  # the next one comes to as much, not more


def test_what_tensor_parallel_ranks_send_by_hand() -> None:
    one = rehearse_rank(*job_and_layout({"tp": 2, "gas": 2}), rank=0)
    half = 2 * 64 * 64 // 2  # of [sequence, hidden] in bf16
    # Two regions of four layers and the head are entered by a gather; those and the embedding are left by a scatter.
    assert calls(one, "tensor")["all_gather", "forward"] == (2 * 9, 2 * 9 * half)
    assert calls(one, "tensor")["reduce_scatter", "forward"] == (2 * 9, 2 * 9 * half)
    assert calls(one, "tensor")["all_gather", "backward"] == (2 * 18, 2 * 18 * half)
    assert calls(one, "tensor")["reduce_scatter", "backward"] == (2 * 9, 2 * 9 * half)
    assert calls(one, "bookkeeping") == {("all_reduce", "loss"): (1, 8), ("all_reduce", "norm"): (1, 4)}


def test_zero_gathers_and_scatters_by_hand() -> None:
    one = rehearse_rank(*job_and_layout({"dp": 2, "zero": 3, "gas": 8}), rank=1)
    layer, ends = 2 * (64 * 192 + 3 * 64 * 192 + 2 * 64), 2 * (2 * 256 * 64 + 64)  # bytes in bf16
    assert calls(one, "zero")["all_gather", "forward"] == (8 * 6, 8 * (4 * layer + ends) // 2)
    assert calls(one, "zero")["all_gather", "backward"] == (8 * 4, 8 * 4 * layer // 2)
    assert calls(one, "zero")["reduce_scatter", "backward"] == (8 * 6, 8 * 2 * (4 * layer + ends) // 2)
    assert one.microbatches == 3


@pytest.mark.quick_cases(every=4)
@pytest.mark.parametrize(
    "fields",
    [{"gas": 2}, {"tp": 2, "dp": 2, "gas": 2}, {"dp": 2, "zero": 3, "gas": 2}, {"pp": 2, "gas": 4, "schedule": "zero-bubble"}],
    ids=str,
)
def test_fake_tensors_measure_what_real_ones_do(fields: dict[str, Any]) -> None:
    job, layout = job_and_layout({**fields, "recompute": "selective"}, precision="fp32")
    pretended, real = (rehearse_rank(job, layout, 0, device) for device in ("meta", "cpu"))
    for name in ("memory", "peak", "moment", "flops", "collectives", "layers"):
        assert getattr(pretended, name) == getattr(real, name), name


@pytest.mark.quick_cases(every=5)
@pytest.mark.parametrize(
    "fields",
    [
        {"gas": 9},
        {"pp": 4, "gas": 12},
        {"pp": 2, "gas": 8, "schedule": "zero-bubble"},
        {"dp": 2, "gas": 6, "zero": 1},
        {"pp": 2, "dp": 2, "gas": 9, "zero": 3},
    ],
    ids=str,
)
def test_few_micro_batches_extrapolate_to_all(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    job, layout = job_and_layout(fields)
    few = rehearse_rank(job, layout, 0)
    monkeypatch.setattr("ultrascale.measure.rehearse_rank.shorten", lambda layout, _: ShortSchedule(layout.gas))
    every = rehearse_rank(job, layout, 0)
    assert few.microbatches < every.microbatches == layout.gas
    assert (few.flops, few.collectives, few.memory, few.peak) == (every.flops, every.collectives, every.memory, every.peak)


def test_a_schedule_is_cut_where_it_repeats_itself() -> None:
    layout = Layout(pp=4, gas=64)
    assert [shorten(layout, rank).microbatches for rank in range(4)] == [5, 4, 3, 3]
    short = shorten(layout, 0)
    assert (short.end - short.begin, short.times) == (2, 60)
    assert [short.weight(place) for place in (None, 0, short.begin, short.end)] == [1, 1, 60, 1]
    assert shorten(Layout(pp=4, gas=8, schedule="afab"), 0) == ShortSchedule(8)  # holds all of them
    assert lint(cut(schedule_of(layout), 5)) == []
    assert sum(action.kind is ActionKind.B for action in cut(schedule_of(layout), 5).actions[0]) == 5


def test_experts_with_equal_load() -> None:
    assert split_evenly(10, 4) == [3, 3, 2, 2]
    one = rehearse_rank(*job_and_layout({"dp": 2, "ep": 2}, EXPERTS), rank=0)
    rows = 2 * SEQ * 64 * 2 // 2  # two choices a token, in bf16, half of them to the other rank
    assert calls(one, "expert")["all_to_all", "backward"] == (4 * 2, 4 * 2 * rows)
    counts = 8 * 8 // 2
    assert calls(one, "expert")["all_to_all", "forward"] == (4 * 3, 4 * (2 * rows + counts))
    router, experts = 2 * 64 * 8, 2 * 2 * 64 * 3 * 96
    attention = 2 * 64 * (2 * 64 + 2 * 32)
    assert one.flops["mm"] == 3 * SEQ * (4 * (attention + router + experts) + 2 * 64 * 256)


def test_a_split_backward_under_zero_in_two_formats() -> None:
    """All weight gradients come after the last input gradient: FSDP2 takes them in one format only, that of the others."""
    job, layout = job_and_layout({"pp": 2, "dp": 2, "gas": 2, "zero": 1, "schedule": "zero-bubble"})
    one = rehearse_rank(job, layout, 3)
    assert one.memory.parameters == estimate(job, layout).memory[1].memory.parameters
    assert one.memory.gradients == whole_gradients(job, layout, 1)  # fullest is the loss before, without any


def test_deferred_weight_grads_gather_the_sequence_when_run() -> None:
    """A deferred weight gradient keeps its shard of the sequence and gathers it only when it runs."""
    job, layout = job_and_layout({"pp": 2, "tp": 4, "gas": 4, "schedule": "zero-bubble"})
    job = job.changed(model=MODEL.model_copy(update={"kv_heads": 4}))
    one = rehearse_rank(job, layout, 4)
    again = calls(one, "tensor")["all_gather", "backward"]
    assert again[0] == 4 * (2 * 2 * 2 + 2 - 1)  # 2 layers: gradients of 2 outputs, 2 inputs again; the head's input again


def test_every_stage_is_run_and_reported() -> None:
    job, layout = job_and_layout({"pp": 4, "gas": 4})
    messages: list[str] = []
    found = rehearse(job, layout, ranks_of(layout, None, "all"), progress=messages.append)
    assert [one.place.pp for one in found] == [0, 1, 2, 3]
    assert len(messages) == 4
    assert found[0].memory.activations > found[2].memory.activations
    assert not dist.is_initialized()


def test_cached_operators_alias_storages_like_the_first_call() -> None:
    with QuickFakeTensorMode():
        x = torch.zeros(4, 6)
        for _ in range(2):
            view, fresh, same = x.t()[1:], x + 1, x.add_(1)
            assert view.untyped_storage()._cdata == x.untyped_storage()._cdata != fresh.untyped_storage()._cdata
            assert (view.shape, view.stride(), view.storage_offset()) == ((5, 4), (1, 6), 1)
            assert same is x
            assert fresh.device.type == "cpu"
            assert (x.long() * 2.0).dtype == torch.float32
            assert (x.long() * 2).dtype == torch.int64
            assert [part.t().storage_offset() for part in (x[:2], x[2:])] == [0, 12]
        x.resize_(9, 6)
        assert x.shape == (9, 6)


def test_the_observer_sees_allocations_and_whole_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearse_world, "_KNOWN", {})  # of other rehearsals in this process

    class Observer:
        def __init__(self) -> None:
            self.bytes, self.operators = 0, list[str]()

        def track_storage(self, storage: torch.UntypedStorage) -> None:
            self.bytes += storage.nbytes()

        def count(self, func: Any, *_: Any) -> None:
            self.operators.append(func._opname)

        def after_operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
            self.operators.append(f"{func._opname}, unknown")

    with QuickFakeTensorMode() as fake:
        x = torch.zeros(4, 6)
        observers = []
        for _ in range(2):
            fake.watcher = watcher = Observer()
            fresh = x.t() + 1  # a view has no memory of its own
            fresh.add_(x.t())
            torch.nn.functional.mse_loss(fresh, x.t())  # torch decomposes it into others
            fake.watcher = None
            observers.append(watcher)
    first, again = observers
    assert first.operators == ["t, unknown", "add, unknown", "t", "add_, unknown", "t", "mse_loss, unknown"]
    assert (first.bytes, again.bytes) == (0, 4 * 24 + 4)  # what is unknown, the watcher looks at itself
    assert again.operators == ["t", "add", "t", "add_", "t", "mse_loss"]


BAD: list[tuple[list[str], str]] = [
    (["--rank", "4"], "--rank is 4 but the plan has ranks 0 to 3: try 0"),
    (["--rank", "-1"], "--rank is -1 but the plan has ranks 0 to 3"),
    (["--stage", "2"], "--stage is '2' but the plan has stages 0 to 1: try all"),
    (["--stage", "last"], "try all"),
    (["--rank", "0", "--stage", "all"], "give one of them"),
    (["--device", "tpu"], "--device is 'tpu' but a rehearsal runs on meta"),
    (["--device", "cuda"], "torch sees no GPU here: try --device meta"),
    (
        ["--kernels", "flash"],
        "--kernels is 'flash' but a rehearsal runs the engine's fused kernels or eager operators",
    ),
]


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    job, layout = job_and_layout({"pp": 2, "tp": 2, "gas": 4})
    return Plan(job=job, layout=layout, estimate=estimate(job, layout)).save(tmp_path / "plan.yaml")


@pytest.mark.parametrize(("words", "sentence"), BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_bad_options_are_one_sentence(words: list[str], sentence: str, plan_file: Path, run: Any) -> None:
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, out, err = run("rehearse", plan_file, *words)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_a_broken_plan_is_one_sentence(plan_file: Path, run: Any) -> None:
    whole = plan_file.read_text()
    plan_file.write_text(whole[: len(whole) // 2])
    code, _, err = run("rehearse", plan_file)
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    code, _, err = run("rehearse", plan_file.with_name("none.yaml"))
    assert code == 2
    assert "none.yaml" in err


def test_unsupported_plans_are_refused() -> None:
    job, layout = job_and_layout({"dp": 2})
    with pytest.raises(SpecError, match="has 2 GPUs"):
        check(job, layout.changed(dp=4), "meta")
    with pytest.raises(SpecError, match="data_parallel: bucketed"):
        check(job.changed(precision="fp32"), layout.changed(data_parallel="ddp"), "meta")
    with pytest.raises(SpecError, match="dropout is true but ultrascale train runs false"):
        check(job.changed(dropout=True), layout, "meta")


def test_the_command_prints_and_writes_measured_and_predicted(plan_file: Path, run: Any) -> None:
    out = plan_file.with_name("out.json")
    code, output, _ = run("rehearse", plan_file, "--stage", "all", "--json", out)
    assert code == 0
    for word in ("one rank of each stage", "parameters", "exact", "collectives of one step", "reduce_scatter", "not predicted"):
        assert word in output
    data = json.loads(out.read_text())
    assert [one["place"]["pp"] for one in data["ranks"]] == [0, 1]
    first = data["ranks"][0]
    terms = {term["label"]: term for term in first["compared"]}
    assert terms["parameters"]["predicted"] == terms["parameters"]["rehearsed"] == first["memory"]["parameters"]
    assert {"technique", "kind", "group", "where", "calls", "bytes"} == set(first["collectives"][0])
    assert "fits: stage 0 has" in " ".join(output.split())
    assert data["room"]["fits"]
    assert data["room"]["tensors_gib"] == max(one["peak"] for one in data["ranks"]) / GIB


def test_a_plan_that_does_not_fit_names_the_engine_to_plan_for(plan_file: Path, run: Any) -> None:
    whole = Plan.load(plan_file)
    peak = rehearse_rank(whole.job, whole.layout, 0, kernels="fused").peak / GIB
    beside = prediction(whole.job, whole.layout, "fused").memory[0].memory.runtime / GIB
    gpu = whole.job.cluster.gpu.model_copy(update={"memory_gib": peak + beside - 0.001})
    job = whole.job.changed(cluster=whole.job.cluster.model_copy(update={"gpu": gpu}))
    file = Plan(job=job, layout=whole.layout, estimate=estimate(job, whole.layout)).save(plan_file.with_name("small.yaml"))
    code, output, _ = run("rehearse", file, "--json", file.with_suffix(".json"))
    output = " ".join(output.split())
    assert code == 1
    assert "does not fit: stage 0 has" in output
    assert "0.0 GiB too much" in output
    fits_on_paper = Plan.load(file).estimate.memory[0].memory.total / GIB <= gpu.memory_gib
    assert ("plan with --framework ultrascale" in output) == fits_on_paper
    assert not json.loads(file.with_suffix(".json").read_text())["room"]["fits"]


@pytest.mark.quick_cases(every=3)
@pytest.mark.parametrize(
    "fields", [{"dp": 2, "gas": 4}, {"dp": 4, "zero_shards": 2, "keep_gathered": True}, {"dp": 2, "pp": 2, "gas": 4}]
)
def test_weights_that_are_gathered_in_fp8(fields: dict[str, Any]) -> None:
    """All that ZeRO sends and what it keeps gathered, to the byte; activations are those of an emulation."""
    job, layout = job_and_layout({"zero": 3, **fields}, precision="fp8")
    one = rehearse_rank(job, layout, rank=layout.gpus - 1)
    terms = {term.label: term for term in compared(job, layout, prediction(job, layout), one)}
    assert terms["sent by zero"].predicted == terms["sent by zero"].rehearsed
    for owner in ("parameters", "master", "gradients", "optimizer"):
        assert owner not in terms or terms[owner].predicted == terms[owner].rehearsed, owner
    wide = rehearse_rank(*job_and_layout({"zero": 3, **fields}), rank=layout.gpus - 1)
    assert one.sent("zero", "all_gather") < 0.8 * wide.sent("zero", "all_gather")


@pytest.mark.parametrize("overload", ["default", "dtype", "dtype_out"])
def test_matmuls_with_out_dtype_count_their_flops(overload: str) -> None:
    """torch's own formula of them has no argument for it and fails."""
    formula = operator_tracker._formula(getattr(torch.ops.aten.addmm, overload))
    assert formula is not None
    total, left, right = torch.empty(3, 5), torch.empty(3, 7), torch.empty(7, 5)
    out_dtype = () if overload == "default" else (torch.float32,)
    assert formula((total, left, right, *out_dtype), {"beta": 1.0, "out": total}, total) == 2 * 3 * 7 * 5


def test_grouped_gemms_count_their_flops() -> None:
    """Forward [rows, in] by [experts, in, out]; a weight's gradient [out, rows] by [rows, in], of each expert's own rows."""
    formula = operator_tracker._formula(torch.ops.aten._grouped_mm.default)
    assert formula is not None
    rows, matrices, ends = torch.empty(10, 4), torch.empty(3, 4, 6), torch.tensor([2, 2, 10], dtype=torch.int32)
    matmuls = [2 * count * 4 * 6 for count in (2, 0, 8)]
    assert formula((rows, matrices, ends), {}, torch.empty(10, 6)) == sum(matmuls)
    assert formula((torch.empty(6, 10), rows), {"offs": ends}, torch.empty(3, 6, 4)) == sum(matmuls)
