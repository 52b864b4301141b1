"""Plan → export → import gives the same job and layout, for every engine."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_builders import PLANS, exported, plan_of, planned, random_plan

from builders import make_job
from ultrascale.export import header, targets, write
from ultrascale.export.check import ExportCheck, check_export
from ultrascale.export.common import EngineFormat
from ultrascale.export.read import ImportOptions, plan_from
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.plan import Plan
from ultrascale.specs.validate import build

ENGINES = [engine for engines in targets.ENGINES.values() for engine in engines]


def titles(engine: EngineFormat) -> str:
    return engine.title


def checked(engine: EngineFormat, plan: Plan) -> ExportCheck:
    files, _ = write.for_engine(engine, plan.job, plan.layout)
    return check_export(plan, engine, next(file for file in files if file.name == engine.config))


@pytest.mark.parametrize("engine", ENGINES, ids=titles)
@pytest.mark.parametrize("name", PLANS)
def test_an_engine_runs_the_plan_or_the_lost_fields_are_named(engine: EngineFormat, name: str) -> None:
    lost = NOT_EXPRESSIBLE[engine.title][name].split()
    found = checked(engine, plan_of(name))
    if not lost:
        assert found.differences == ()
        assert found.same
    if found.actual is not None:
        named = dict.fromkeys(_short(one.field) for one in found.differences if not one.field.startswith("framework."))
        assert sorted(named) == sorted(lost)


@pytest.mark.parametrize(
    ("title", "dispatcher"),
    [
        *(("Megatron-LM", one) for one in ("alltoall", "allgather", "deepep", "hybridep")),
        *((title, one) for title in ("torchtitan 0.2 (TOML)", "torchtitan 0.3 (Python)") for one in ("alltoall", "deepep")),
    ],
)
def test_the_dispatcher_of_experts_is_exported(title: str, dispatcher: str) -> None:
    engine = next(one for one in ENGINES if one.title.startswith(title))
    zero = 1 if title == "Megatron-LM" else 3
    layout = Layout(dp=16, ep=16, zero=zero, gas=4).changed(dispatcher=dispatcher)
    job = make_job("qwen3-30b-a3b", "16xh100", 4096, layout, framework=engine.framework)
    found = checked(engine, planned(job, layout))
    assert found.differences == ()
    assert found.same


@pytest.mark.parametrize(
    ("title", "etp"),
    [("Megatron-LM", None), ("Megatron-LM", 1), *((f"torchtitan 0.{n}", 1) for n in (2, 3)), ("torchtitan 0.2", None)],
)
def test_how_tp_cuts_experts_is_exported(title: str, etp: int | None) -> None:
    engine = next(one for one in ENGINES if one.title.startswith(title))
    layout = Layout(dp=8, tp=2, ep=8, etp=etp, zero=1 if title == "Megatron-LM" else 3, gas=8)
    job = make_job("qwen3-30b-a3b", "16xh100", 4096, layout, framework=engine.framework)
    assert "layout.etp" not in {one.field for one in checked(engine, planned(job, layout)).differences}


def test_a_plan_that_fits_in_its_own_engine_alone_can_be_rehearsed() -> None:
    job = make_job(
        "llama-3-8b", "64xh100", 8192, layout := Layout(dp=64, zero=3, keep_gathered=True, gas=2), framework="torchtitan"
    )
    found = checked(next(one for one in ENGINES if one.name == "accelerate"), planned(job, layout))
    assert (found.same, found.runs_plan) == (False, True)
    assert "needs 110" in found.refusal()


@pytest.mark.quick_cases(every=2)
@pytest.mark.parametrize("engine", ENGINES, ids=titles)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_legal_layout_runs_as_planned_or_differs_by_name(engine: EngineFormat, seed: int) -> None:
    found = checked(engine, planned(*random_plan(seed)))
    assert found.same or found.differences or (found.plan_fits and found.actual is not None and not found.actual.fits)
    if not found.differences:
        assert found.actual is not None
        assert found.actual.step_time_s == pytest.approx(found.planned.step_time_s)
        assert found.actual.peak_gib == pytest.approx(found.planned.peak_gib)


@pytest.mark.parametrize("engine", ENGINES, ids=titles)
def test_a_name_with_line_breaks_adds_no_header_line(engine: EngineFormat, tmp_path: Path) -> None:
    plan = plan_of("sharded")
    odd = Model(
        name='mine # "7b" (v2)\nkept for import: job.seq = 1',
        layers=30,
        hidden=960,
        heads=15,
        kv_heads=5,
        ffn=2560,
        vocab=49155,
        norm_eps=3e-6,
        sliding_window=700,
        mlp_bias=True,
        source="a (source) = of\tmy own",
    )
    job = plan.job.changed(model=odd)
    files, _ = write.for_engine(engine, job, plan.layout)
    write.into(tmp_path, files, force=False)
    without_model = engine.name == "torchtitan"  # the debug model stands in
    found = plan_from(tmp_path / engine.config, ImportOptions(model=odd if without_model else None))
    assert found.plan.job.seq == job.seq
    if "model" in engine.program:
        assert found.plan.job.model == odd


# What each engine lacks for each plan; fields of the layout without their first word, single ones of a model as `model.…`.
NOT_EXPRESSIBLE = {
    "torchtitan 0.2 (TOML)": {
        "one GPU": "model",
        "dense": "zero keep_gathered model.…",
        "sharded": "",
        "long": "zero keep_gathered job.gradients model",
        "experts": "zero keep_gathered model",
        "qwen": "",
        "latent": "zero keep_gathered",
        "no bubble": "sequence_parallel job.optimizer",
        "tied": "data_parallel model",
    },
    "torchtitan 0.3 (Python)": {
        "one GPU": "model",
        "dense": "zero keep_gathered model.…",
        "sharded": "",
        "long": "zero keep_gathered job.gradients",
        "experts": "etp zero keep_gathered model",
        "qwen": "",
        "latent": "zero keep_gathered",
        "no bubble": "job.optimizer",
        "tied": "data_parallel model",
    },
    "Megatron-LM": {
        "one GPU": "",
        "dense": "",
        "sharded": "",
        "long": "",
        "experts": "",
        "qwen": "",
        "latent": "",
        "no bubble": "schedule virtual_stages",
        "tied": "",
    },
    "nanotron": {
        "one GPU": "model.…",
        "dense": "schedule virtual_stages",
        "sharded": "zero zero_shards model.…",
        "long": "zero context_parallel recompute model.…",
        "experts": "",
        "qwen": "zero job.precision model.…",
        "latent": "model.…",
        "no bubble": "schedule virtual_stages job.optimizer model.…",
        "tied": "data_parallel",
    },
    "DeepSpeed": {
        "one GPU": "job.gradients",
        "dense": "pp sequence_parallel schedule virtual_stages",
        "sharded": "zero_shards",
        "long": "sequence_parallel context_parallel recompute",
        "experts": "pp ep sequence_parallel",
        "qwen": "ep job.precision",
        "latent": "pp ep sequence_parallel",
        "no bubble": "pp schedule virtual_stages job.gradients job.optimizer",
        "tied": "data_parallel",
    },
    "Accelerate": {
        "one GPU": "",
        "dense": "dp pp zero keep_gathered sequence_parallel schedule virtual_stages",
        "sharded": "",
        "long": "zero keep_gathered sequence_parallel recompute",
        "experts": "dp pp ep zero keep_gathered sequence_parallel",
        "qwen": "ep",
        "latent": "dp pp ep zero keep_gathered sequence_parallel",
        "no bubble": "dp pp zero keep_gathered schedule virtual_stages",
        "tied": "data_parallel",
    },
}


@pytest.mark.parametrize("engine", ENGINES, ids=titles)
@pytest.mark.parametrize("name", PLANS)
def test_only_settings_an_engine_lacks_are_not_expressed(engine: EngineFormat, name: str) -> None:
    plan = plan_of(name)
    _, lines = write.for_engine(engine, plan.job, plan.layout)
    unsaid = [
        line.removeprefix(f"{header.NOT_EXPRESSIBLE}: ").split(" = ")[0]
        for line in lines
        if line.startswith(header.NOT_EXPRESSIBLE)
    ]
    assert " ".join(dict.fromkeys(map(_short, unsaid))) == NOT_EXPRESSIBLE[engine.title][name]


def _short(field: str) -> str:
    return "model.…" if field.startswith("model.") else field.removeprefix("layout.")


def test_inexpressible_settings_are_listed_with_field_and_value(tmp_path: Path) -> None:
    plan = plan_of("no bubble")
    lines = (exported(plan, "nanotron", tmp_path) / "config.yaml").read_text().splitlines()
    assert "# not expressible here: layout.schedule = zb-v (nanotron has afab and 1f1b)" in lines
    assert "# not expressible here: layout.virtual_stages = 2 (nanotron has one stage a rank)" in lines
    assert not any("layout.zero" in line for line in lines)  # ZeRO-0 is what it has


def test_expressible_settings_use_the_engines_own_option(tmp_path: Path) -> None:
    script = (exported(plan_of("dense"), "megatron", tmp_path) / "run.sh").read_text()
    for words in ("--tensor-model-parallel-size 8", "--num-virtual-stages-per-pipeline-rank 4", "--use-distributed-optimizer"):
        assert words in script
    assert "not expressible" not in script


def test_torchtitan_has_one_pipeline_run_per_step(tmp_path: Path) -> None:
    """Its accumulation steps each fill and drain the pipeline: all micro-batches belong into one local batch."""
    settings = tomllib.loads((exported(plan_of("dense"), "torchtitan", tmp_path) / "config.toml").read_text())
    assert settings["training"]["local_batch_size"] == 128
    assert settings["training"]["global_batch_size"] == 512
    assert settings["parallelism"]["pipeline_parallel_microbatch_size"] == 1


def test_no_comment_overrides_a_setting(tmp_path: Path) -> None:
    file = exported(plan_of("dense"), "megatron", tmp_path) / "run.sh"
    before = plan_from(file).plan
    forged = "# kept for import: layout.tp = 4\n# kept for import: job.seq = 1024\n# not expressible here: layout.zero = 3\n"
    file.write_text(file.read_text() + forged)
    assert plan_from(file).plan == before


def test_an_edited_number_is_read(tmp_path: Path) -> None:
    file = exported(plan_of("dense"), "megatron", tmp_path) / "run.sh"
    file.write_text(file.read_text().replace("--micro-batch-size 1", "--micro-batch-size 2"))
    found = plan_from(file).plan.layout
    assert (found.mbs, found.gas) == (2, 64)


def test_header_lines_are_read_whatever_is_in_a_value() -> None:
    kept = {"model.name": "a (b) = c", "job.cluster": {"gpu": "h100", "nodes": 2}, "layout.mbs": 2}
    missing = {**kept, "layout.zero": 2, "layout.schedule": "1f1b"}
    program = ("layout.mbs",)
    lines = header.lines(missing, Layout(dp=2, zero=2), {"layout.zero": "has (its) own"}, "X", program)
    assert header.parse("\n".join(f"# {line}" for line in lines), program) == kept


SCALINGS: dict[str, dict[str, object]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear, no whole factor": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_positions": 4096, "attention_factor": 1.25},
    "llama3 of another context": {"factor": 4.0, "original_max_positions": 4096},
}


@pytest.mark.quick_cases(every=2)
@pytest.mark.parametrize("base", ["llama-2-7b", "llama-3.1-8b"])
@pytest.mark.parametrize("engine", ENGINES, ids=titles)
@pytest.mark.parametrize("case", SCALINGS)
def test_rotary_scaling_survives_the_round_trip(engine: EngineFormat, case: str, base: str) -> None:
    plan = plan_of("sharded")
    model = build(Model, {**Model.load(base).model_dump(), "rope_scaling": SCALINGS[case]}, "model")
    job = plan.job.changed(model=model)
    _, lines = write.for_engine(engine, job, plan.layout)
    lost = [line for line in lines if line.startswith(f"{header.NOT_EXPRESSIBLE}: model")]
    found = checked(engine, planned(job, plan.layout))
    assert any(one.field.startswith("model") for one in found.differences) == bool(lost)


@pytest.mark.quick_cases(every=2)
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("engine", ENGINES, ids=titles)
@pytest.mark.parametrize("activation", ["gelu", "gelu_exact", "geglu", "geglu_exact"])
def test_either_gelu_survives_the_round_trip(engine: EngineFormat, activation: str, biases: bool) -> None:
    plan = plan_of("sharded")
    fields = {**Model.load("gpt2").model_dump(), "max_positions": 8192, "activation": activation, "mlp_bias": biases}
    model = build(Model, {**fields, "attention_output_bias": biases}, "model")
    job = plan.job.changed(model=model)
    _, lines = write.for_engine(engine, job, plan.layout)
    lost = [line for line in lines if line.startswith(f"{header.NOT_EXPRESSIBLE}: model")]
    found = checked(engine, planned(job, plan.layout))
    assert any(one.field.startswith("model") for one in found.differences) == bool(lost)


def megatron_export(**changes: object) -> tuple[str, list[str]]:
    plan = plan_of("sharded")
    model = build(Model, {**Model.load("llama-2-7b").model_dump(), "max_positions": 131072, **changes}, "model")
    files, lines = write.for_engine(targets.ENGINES["megatron"][0], plan.job.changed(model=model), plan.layout)
    return files[0].text, [line for line in lines if line.startswith(header.NOT_EXPRESSIBLE)]


def test_megatron_gets_only_the_rotary_scaling_it_implements() -> None:
    text, lines = megatron_export(rope_scaling=SCALINGS["linear"])
    assert "--rotary-seq-len-interpolation-factor 4" in text
    assert "--use-rope-scaling" not in text
    assert not any("rope_scaling" in line for line in lines)
    for case in ("linear, no whole factor", "dynamic", "yarn"):
        text, lines = megatron_export(rope_scaling=SCALINGS[case])
        assert "--use-rope-scaling" not in text
        assert "interpolation-factor" not in text
        assert any(f"rope_scaling.rope_type = {case.split(',')[0]} (Megatron-LM has Llama 3's" in line for line in lines)


def test_megatrons_gelu_is_the_exact_one_where_no_kernel_adds_a_bias() -> None:
    biases = dict.fromkeys(("qkv_bias", "attention_output_bias", "mlp_bias"), True)
    text, lines = megatron_export(activation="gelu_exact", **biases)
    assert "--no-bias-gelu-fusion" in text
    assert not lines
    text, lines = megatron_export(activation="gelu", **biases)
    assert "--no-bias-gelu-fusion" not in text
    assert not lines
    assert not megatron_export(activation="gelu_exact")[1]
    assert "model.activation = gelu (Megatron-LM has" in megatron_export(activation="gelu")[1][0]
