"""Plan → export → import gives the same job and layout, for every engine."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_builders import PLANS, exported, plan_of, random_plan

from ultrascale.export import header, targets, write
from ultrascale.export.common import EngineFormat
from ultrascale.export.read import plan_from
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.validate import build

ENGINES = [engine for engines in targets.ENGINES.values() for engine in engines]


def titles(engine: EngineFormat) -> str:
    return engine.title


@pytest.mark.parametrize("engine", ENGINES, ids=titles)
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_survives_the_round_trip(engine: EngineFormat, name: str, tmp_path: Path) -> None:
    plan = plan_of(name)
    found = plan_from(exported(plan, engine.name, tmp_path) / engine.config)
    assert found.engine is engine
    assert found.plan.layout == plan.layout
    assert found.plan.job == plan.job
    assert found.plan.estimate == plan.estimate
    assert not [note for note in found.notes if "did you mean" in note], "none of our own words is a slip"


@pytest.mark.parametrize("engine", ENGINES, ids=titles)
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_legal_layout_survives_the_round_trip(
    engine: EngineFormat, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    job, layout = random_plan(seed)
    folder = tmp_path_factory.mktemp("out")
    files, _ = write.for_engine(engine, job, layout)
    write.into(folder, files, force=False)
    found = plan_from(folder / engine.config)
    shutil.rmtree(folder)
    assert (found.plan.job, found.plan.layout) == (job, layout)


@pytest.mark.parametrize("engine", ENGINES, ids=titles)
def test_a_custom_model_survives_the_round_trip(engine: EngineFormat, tmp_path: Path) -> None:
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
    found = plan_from(tmp_path / engine.config)
    assert (found.plan.job, found.plan.layout) == (job, plan.layout)


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
        "experts": "zero keep_gathered model",
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
        "one GPU": "job.seq job.gradients model",
        "dense": "pp sequence_parallel schedule virtual_stages job.seq model",
        "sharded": "zero_shards job.seq model",
        "long": "sequence_parallel context_parallel recompute job.seq model",
        "experts": "pp ep sequence_parallel job.seq model",
        "qwen": "ep job.seq job.precision model",
        "latent": "pp ep sequence_parallel job.seq model",
        "no bubble": "pp schedule virtual_stages job.seq job.gradients job.optimizer model",
        "tied": "data_parallel job.seq model",
    },
    "Accelerate": {
        "one GPU": "mbs gas job.seq model",
        "dense": "dp pp zero keep_gathered sequence_parallel schedule virtual_stages gas job.seq model",
        "sharded": "gas job.seq model",
        "long": "zero keep_gathered sequence_parallel gas recompute job.seq job.gradients model",
        "experts": "dp pp ep zero keep_gathered sequence_parallel gas job.seq model",
        "qwen": "ep gas job.seq model",
        "latent": "dp pp ep zero keep_gathered sequence_parallel gas job.seq model",
        "no bubble": "dp pp zero keep_gathered schedule virtual_stages mbs gas job.seq job.optimizer model",
        "tied": "data_parallel mbs gas job.seq model",
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
    short = dict.fromkeys("model.…" if name.startswith("model.") else name.removeprefix("layout.") for name in unsaid)
    assert " ".join(short) == NOT_EXPRESSIBLE[engine.title][name]


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


def test_an_edited_setting_overrides_the_header(tmp_path: Path) -> None:
    """The header has the original value of the setting; an edit of the setting makes it stale."""
    plan = plan_of("no bubble")
    file = exported(plan, "nanotron", tmp_path) / "config.yaml"
    file.write_text(
        file.read_text().replace("pp_engine: 1f1b", "pp_engine: afab").replace("virtual_stages = 2", "virtual_stages = 1")
    )
    found = plan_from(file)
    assert found.plan.layout == plan.layout.changed(schedule="afab", virtual_stages=1)
    assert any("layout.schedule" in note and "own setting holds" in note for note in found.notes)


def test_an_edited_number_is_read(tmp_path: Path) -> None:
    file = exported(plan_of("dense"), "megatron", tmp_path) / "run.sh"
    file.write_text(file.read_text().replace("--micro-batch-size 1", "--micro-batch-size 2"))
    found = plan_from(file).plan.layout
    assert (found.mbs, found.gas) == (2, 64)


def test_header_lines_are_read_whatever_is_in_a_value() -> None:
    missing = {
        "model.name": "a (b) = c",
        "layout.zero": 2,
        "job.cluster": {"gpu": "h100", "nodes": 2},
        "layout.schedule": "1f1b",
    }
    lines = header.lines(missing, Layout(dp=2, zero=2), {"layout.zero": "has (its) own"}, "X")
    assert header.parse("\n".join(f"# {line}" for line in lines)) == missing


SCALINGS: dict[str, dict[str, object]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear, no whole factor": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_positions": 4096, "attention_factor": 1.25},
    "llama3 of another context": {"factor": 4.0, "original_max_positions": 4096},
}


@pytest.mark.parametrize("engine", ENGINES, ids=titles)
@pytest.mark.parametrize("case", SCALINGS)
@pytest.mark.parametrize("base", ["llama-2-7b", "llama-3.1-8b"])
def test_rotary_scaling_survives_the_round_trip(engine: EngineFormat, case: str, base: str, tmp_path: Path) -> None:
    plan = plan_of("sharded")
    model = build(Model, {**Model.load(base).model_dump(), "rope_scaling": SCALINGS[case]}, "model")
    files, _ = write.for_engine(engine, plan.job.changed(model=model), plan.layout)
    write.into(tmp_path, files, force=False)
    assert plan_from(tmp_path / engine.config).plan.job.model == model


@pytest.mark.parametrize("engine", ENGINES, ids=titles)
@pytest.mark.parametrize("activation", ["gelu", "gelu_exact", "geglu", "geglu_exact"])
@pytest.mark.parametrize("biases", [True, False])
def test_either_gelu_survives_the_round_trip(engine: EngineFormat, activation: str, biases: bool, tmp_path: Path) -> None:
    plan = plan_of("sharded")
    fields = {**Model.load("gpt2").model_dump(), "max_positions": 8192, "activation": activation, "mlp_bias": biases}
    model = build(Model, {**fields, "attention_output_bias": biases}, "model")
    files, _ = write.for_engine(engine, plan.job.changed(model=model), plan.layout)
    write.into(tmp_path, files, force=False)
    assert plan_from(tmp_path / engine.config).plan.job.model == model


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
