"""From words to a run: overrides, what follows from them, and refusals before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ultrascale.cost.estimate import estimate
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.plan import Plan
from ultrascale.train.request import TRY_SEQUENCES, Overrides, _resized, from_model, from_plan, from_words

TINY = Model.load("tiny")


def tried(*words: str, world: int = 1):
    return from_model(TINY, Overrides.parse(words), world)


def planned(layout: Layout, seq: int = 128, precision: str = "fp32") -> Plan:
    job = Job(
        model=TINY,
        cluster=Cluster.load(f"{layout.gpus}xh100"),
        seq=seq,
        batch_tokens=layout.batch_tokens(seq),
        precision=precision,
    )
    return Plan(job=job, layout=layout, estimate=estimate(job, layout))


@pytest.mark.parametrize(
    ("words", "world"),
    [
        ((), 1),
        (("layout.dp=2", "layout.tp=2"), 4),
        (("layout.pp=4", "layout.schedule=zb-v"), 4),
        (("layout.gas=4",), 2),
        (("layout.mbs=2",), 2),
        (("layout.cp=2", "layout.context_parallel=ring", "layout.zero=3"), 2),
    ],
)
def test_a_default_run_has_one_batch_for_every_layout(words, world):
    request = tried(*words, world=world)
    assert request.layout.dp * request.layout.mbs * request.layout.gas == TRY_SEQUENCES
    assert request.layout.gpus == world


def test_micro_batch_and_accumulation_together_are_the_batch():
    layout = tried("layout.mbs=1", "layout.gas=3", world=2).layout
    assert (layout.dp, layout.mbs, layout.gas) == (2, 1, 3)


def test_the_micro_batch_of_a_default_run_divides_every_batch_of_a_ramp():
    layout = tried("train.batch_ramp=512:4k,1k:16k", world=2).layout
    assert (layout.dp, layout.mbs, layout.gas) == (2, 2, 4)


@pytest.mark.parametrize(
    ("words", "world", "says", "works"),
    [
        (["train.batch_ramp=400:4k"], 1, "mbs·dp·seq = 1·1·128 = 128: try 384 or 512", "train.batch_ramp=384:4k"),
        (["train.batch_ramp=2k:4k"], 1, "must have less than job.batch_tokens = 2048: try ", "train.batch_ramp=1024:4k"),
        (["train.batch_ramp=1k:4k", "layout.mbs=16"], 1, "one micro-batch of mbs·dp·seq = 16·1·128", "layout.mbs=8"),
        (
            ["train.batch_ramp=256:4k", "layout.pp=2", "layout.schedule=dualpipe-v"],
            2,
            "2 micro-batches of mbs·dp·seq = 1·1·128 = 128, but dualpipe-v on 2 ranks needs at least 4 to fill the pipeline: "
            "try 512",
            "train.batch_ramp=512:4k",
        ),
        (
            ["train.batch_ramp=640:4k", "layout.pp=2", "layout.schedule=interleaved"],
            2,
            "5 micro-batches of mbs·dp·seq = 1·1·128 = 128, but interleaved on 2 ranks runs them in 2 equal rounds: try 768",
            "train.batch_ramp=768:4k",
        ),
    ],
)
def test_every_batch_of_a_ramp_must_fit_the_layout(words, world, says, works):
    with pytest.raises(SpecError) as error:
        tried(*words, world=world)
    assert str(error.value).startswith("train.batch_ramp has a batch of ")
    assert says in str(error.value)
    assert tried(*words, works, world=world).training.batch_ramp is not None


@pytest.mark.parametrize(
    ("words", "world", "says", "works"),
    [
        (
            ["train.seq_stages=48:4k"],
            1,
            "48 tokens but they must be an equal part of job.seq = 128: try ",
            "train.seq_stages=64:4k",
        ),
        (["train.seq_stages=128:4k"], 1, "they must be an equal part of job.seq = 128: try ", "train.seq_stages=64:4k"),
        (["train.seq_stages=2:4k", "layout.cp=2"], 2, "2 tokens, and with these layout.", "train.seq_stages=4:4k"),
    ],
)
def test_shorter_sequences_must_fit_the_layout(words, world, says, works):
    with pytest.raises(SpecError) as error:
        tried(*words, world=world)
    assert str(error.value).startswith("train.seq_stages has sequences of ")
    assert says in str(error.value)
    assert tried(*words, works, world=world).training.seq_stages is not None


def test_as_little_is_recomputed_as_fits():
    job = Job(model=Model.load("llama-3-8b"), cluster=Cluster.load("8xh100"), seq=8192, batch_tokens=8192 * 64)
    layout = Layout(dp=8, zero=3, mbs=4, gas=2)
    plan = Plan(job=job, layout=layout, estimate=estimate(job, layout))
    assert not plan.estimate.fits
    found = from_plan(plan, Overrides.parse(["layout.recompute=auto"]), 8)
    assert found.layout.recompute != "none"
    assert estimate(job, found.layout).fits
    assert "layout.recompute_layers" in found.notes[0]
    small = from_plan(plan, Overrides.parse(["layout.recompute=auto", "layout.mbs=1", "layout.gas=8"]), 8)
    assert small.layout.recompute == "none"
    with pytest.raises(SpecError, match="without a plan no GPU sets a limit"):
        tried("layout.recompute=auto")
    with pytest.raises(SpecError, match="also finds the layers"):
        tried("layout.recompute=auto", "layout.recompute_layers=2")
    with pytest.raises(SpecError, match="schedule"):  # a layout that cannot run is refused as without auto
        from_plan(plan, Overrides.parse(["layout.recompute=auto", "layout.schedule=zb-v"]), 8)


def test_dp_follows_from_the_processes():
    assert tried("layout.tp=2", world=8).layout.dp == 4


def test_schedules_with_two_stages_per_rank_get_them():
    assert tried("layout.pp=2", "layout.schedule=dualpipe-v", world=2).layout.virtual_stages == 2
    assert tried("layout.pp=2", "layout.schedule=interleaved", "layout.virtual_stages=4", world=2).layout.virtual_stages == 4


def test_a_plan_is_adapted_to_the_processes_with_a_note():
    request = from_plan(planned(Layout(dp=4, gas=2)), Overrides.parse(["layout.tp=2"]), 4)
    assert (request.layout.dp, request.layout.tp, request.layout.gas) == (2, 2, 4)
    assert any("layout.dp=2" in note for note in request.notes)


def test_a_plan_in_bf16_runs_in_fp32_where_there_is_no_gpu():
    plan = planned(Layout(), precision="bf16")
    request = from_plan(plan, Overrides(), 1, gpu=False)
    assert request.job.precision == "fp32"
    assert "fp32" in request.notes[0]
    assert from_plan(plan, Overrides.parse(["job.precision=bf16"]), 1, gpu=False).job.precision == "bf16"


@pytest.mark.parametrize(
    ("words", "devices", "layout"),
    [
        ([], 4, {"dp": 4, "gas": 2}),  # as planned
        (["layout.tp=2"], 4, {"dp": 2, "tp": 2, "gas": 4}),
        ([], 3, {"dp": 1, "gas": 8}),  # too few GPUs here: one process
    ],
)
def test_a_plan_starts_its_processes_where_there_are_enough_devices(
    words: list[str], devices: int, layout: dict[str, int], tmp_path: Path
) -> None:
    planned(Layout(dp=4, gas=2)).save(tmp_path / "plan.yaml")
    request = from_words([str(tmp_path / "plan.yaml"), *words], {}, None, False, devices=devices)
    assert request.layout == Layout(**layout)
    assert from_words([str(tmp_path / "plan.yaml")], {}, 2, False, devices=devices).layout.dp == 2  # --nproc 2


@pytest.mark.parametrize(
    ("words", "world", "says"),
    [
        (["tp=2"], 1, "layout.tp=2"),
        (["layout.tq=2"], 1, "did you mean 'tp'"),
        (["layut.tp=2"], 1, "layout"),
        (["layout.tp"], 1, "section.field=value"),
        (["job.model=x"], 1, "job.model"),
        (["train.lr=fast"], 1, "train.lr"),
        (["train.steps=0"], 1, "train.steps"),
        (["layout.dp=4"], 1, "4·1·1·1 = 4 but there is one process"),
        (["layout.tp=8"], 4, "= 8 but there are 4 processes"),
        (["layout.tp=2"], 3, "these work: pp3"),
        (["layout.tp=16"], 16, "heads = 8"),
        (["layout.pp=16"], 16, "8 layers"),
        (["layout.cp=2", "job.seq=127"], 2, "seq = 127"),
        (["layout.pp=4", "layout.schedule=dualpipe-v", "layout.mbs=1", "layout.gas=4"], 4, "at least 8"),
        (["train.fp8_scaling=column"], 1, "train.fp8_scaling"),
        (["layout.offload=activations"], 1, "try none"),
        (["layout.data_parallel=ddp", "job.precision=bf16"], 2, "data_parallel=bucketed"),
        (["layout.data_parallel=ddp", "layout.pp=2", "layout.schedule=zero-bubble"], 4, "data_parallel=bucketed"),
        (["layout.zero=2", "train.compress=bf16"], 2, "train.compress=none"),
        (["layout.zero=3", "layout.offload=parameters"], 1, "offload=optimizer"),
        (["layout.ep=2"], 2, "no experts"),
    ],
)
def test_unrunnable_requests_are_refused_with_an_alternative(words, world, says):
    with pytest.raises(SpecError) as refused:
        tried(*words, world=world)
    assert says in str(refused.value)


def test_a_refused_layout_names_two_that_work():
    with pytest.raises(SpecError) as refused:
        tried("layout.dp=4")
    assert str(refused.value).count("mbs") == 2


def test_vocabularies_that_tp_does_not_divide_are_refused():
    odd = TINY.model_copy(update={"vocab": 257})
    with pytest.raises(SpecError, match="must divide vocab = 257"):
        from_model(odd, Overrides.parse(["layout.tp=2"]), 2)


@pytest.mark.parametrize(
    ("model", "words", "says"),
    [
        ("tiny", ["train.balance_loss=0.01"], "train.balance_loss is 0.01 but tiny has no experts: try 0"),
        ("tiny", ["train.capacity_factor=1.25"], "train.capacity_factor is 1.25 but tiny has no experts: try null"),
        ("tiny-moe", ["train.capacity_factor=0.001"], "of a sequence's 128 tokens: try 1 or null"),
        ("tiny-moe", ["train.capacity_factor=1.25", "layout.cp=2"], "counts the tokens of whole sequences: try cp=1"),
        ("tiny-moe", ["layout.tp=2", "layout.ep=2"], "over data ranks, of which there are dp·cp = 1: try 1"),
        (
            "tiny-moe",
            ["layout.ep=2", "layout.zero=1", "layout.zero_shards=1"],
            "zero_shards is 1 but must be a multiple of ep = 2",
        ),
        ("tiny-moe", ["layout.ep=2", "layout.data_parallel=ddp"], "try data_parallel=bucketed"),
        ("tiny-moe", ["layout.ep=3"], "layout.ep is 3 but must divide both the 8 experts and dp·cp·tp = 2: try"),
    ],
)
def test_unsupported_expert_settings_are_refused(model, words, says):
    with pytest.raises(SpecError) as refused:
        from_model(Model.load(model), Overrides.parse(words), 2)
    assert says in str(refused.value)


@pytest.mark.parametrize("before", range(1, 9))
@pytest.mark.parametrize("after", range(1, 10))
def test_a_cluster_of_any_size_becomes_one_of_any_other(before: int, after: int) -> None:
    """A run of three processes resumes with two: what stands in for the machine must be a cluster that a file can hold."""
    resized = _resized(Cluster.load(f"{before}xh100"), after)
    assert Cluster.model_validate(dict(resized)).gpus == after
