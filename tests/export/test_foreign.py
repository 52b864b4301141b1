"""Files that other tools wrote: what they say is read, what they do not say is assumed aloud, what is unknown is named."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import samples
from plan_builders import exported, planned

from builders import make_job
from ultrascale.export.read import ImportOptions, plan_from
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError
from ultrascale.specs.framework import Framework
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_a_megatron_script(tmp_path: Path) -> None:
    found = plan_from(written(tmp_path, "run.sh", samples.MEGATRON))
    assert found.plan.layout == Layout(dp=4, tp=4, pp=2, zero=1, mbs=1, gas=64, recompute="selective")
    job = found.plan.job
    assert (job.model.layers, job.seq, job.batch_tokens, job.precision) == (32, 8192, 256 * 8192, "bf16")
    assert job.model.vocab == 128512  # 128,256 padded to a multiple of 128 · tp, as Megatron does
    assert any("padded to 128,512" in note for note in found.notes)
    assert job.framework.name == "megatron-core"
    assert (job.cluster.nodes, job.cluster.gpus_per_node, job.cluster.gpu.name) == (4, 8, "h100")
    assert any("names no GPU: 4x8 h100 is assumed" in note for note in found.notes)
    assert any(note.startswith("not read, since") and "--lr" in note and "--data-path" in note for note in found.notes)
    assert job.total_tokens == 500000 * 256 * 8192


@pytest.mark.parametrize(
    ("model", "modules", "selective"),
    [
        ("llama-3-8b", "core_attn", "modules"),
        ("qwen3-30b-a3b", "layernorm moe_act", "modules"),
        ("qwen3-30b-a3b", "core_attn", "attention"),
        ("deepseek-v3", "mla_up_proj", "modules"),
        ("deepseek-v3", "mla_up_proj moe_act", "cheap"),
    ],
)
def test_megatron_recompute_modules(model: str, modules: str, selective: str, tmp_path: Path) -> None:
    """What the planner assumes of selective recomputation is what run.sh asks for, and other modules are read as such."""
    job = make_job(model, "256xh200", 4096, 256, Framework.load("megatron-core"))
    experts = {} if job.model.moe is None else {"ep": 8}
    layout = Layout(dp=16, pp=16, zero=1, gas=16, recompute="selective", **experts)
    plan = planned(job, layout)
    script = (exported(plan, "megatron", tmp_path) / "run.sh").read_text()
    [written_modules] = re.findall(r"--recompute-modules (.*?) \\", script)
    if selective == "modules":
        assert written_modules == modules
    changed = script.replace(f"--recompute-modules {written_modules} ", f"--recompute-modules {modules} ")
    found = plan_from(written(tmp_path, "changed.sh", changed), ImportOptions(cluster=job.cluster))
    assert (found.plan.layout.recompute, found.plan.job.framework.selective) == ("selective", selective)
    more = changed.replace(f"--recompute-modules {modules} ", f"--recompute-modules {modules} mlp ")
    found = plan_from(written(tmp_path, "more.sh", more), ImportOptions(cluster=job.cluster))
    assert any("may change" in note and "--recompute-modules mlp" in note for note in found.notes)


def test_a_cluster_from_the_user_decides_how_many_data_ranks(tmp_path: Path) -> None:
    file = written(tmp_path, "run.sh", samples.MEGATRON)
    found = plan_from(file, ImportOptions(cluster=Cluster.load("64xh200")))
    assert (found.plan.layout.dp, found.plan.layout.gas) == (8, 32)
    assert not any("assumed" in note for note in found.notes)


def test_a_toml_of_torchtitan(tmp_path: Path) -> None:
    file = written(tmp_path, "train.toml", samples.TORCHTITAN_TOML)
    with pytest.raises(SpecError, match=r"does not say on how many GPUs.*--cluster"):
        plan_from(file)
    found = plan_from(file, ImportOptions(cluster=Cluster.load("16xh100")))
    assert found.plan.layout == Layout(dp=8, tp=2, zero=3, zero_shards=4, mbs=2, gas=1, recompute="full")
    assert found.plan.job.model == Model.load("llama-3.1-8b")
    assert any(note.startswith("not read") and "parallelism.tensor_paralel_degree" in note for note in found.notes)


def test_a_python_configuration_is_read_and_not_run(tmp_path: Path) -> None:
    file = written(tmp_path, "config.py", samples.TORCHTITAN_PYTHON)
    found = plan_from(file, ImportOptions(cluster=Cluster.load("16xh100")))
    assert found.plan.layout == Layout(dp=4, tp=2, pp=2, zero=3, mbs=1, gas=4, recompute="full", keep_gathered=True)
    assert found.plan.job.model.name == "qwen3-8b"
    assert not os.path.exists("/tmp/never")


def test_a_yaml_of_nanotron(tmp_path: Path) -> None:
    found = plan_from(written(tmp_path, "config.yaml", samples.NANOTRON))
    assert found.plan.layout == Layout(dp=8, tp=2, zero=1, mbs=8, gas=2)
    assert found.plan.job.model.tied_embeddings
    assert found.plan.job.model == Model.load("smollm-1.7b")
    assert found.plan.job.framework.name == "nanotron"
    assert any("2x8 h100 is assumed" in note for note in found.notes)


def test_a_json_of_deepspeed_needs_a_model_and_a_sequence(tmp_path: Path) -> None:
    file = written(tmp_path, "ds.json", samples.DEEPSPEED)
    with pytest.raises(SpecError, match=r"does not say how long a sequence is: give --seq"):
        plan_from(file)
    with pytest.raises(SpecError, match=r"does not say which model.*--model llama-3-8b"):
        plan_from(file, ImportOptions(seq=4096))
    found = plan_from(file, ImportOptions(seq=4096, model=Model.load("llama-3-8b")))
    assert found.plan.layout == Layout(dp=8, zero=3, mbs=4, gas=8, offload="optimizer")
    assert found.plan.job.batch_tokens == 256 * 4096
    assert "not read: gradient_cliping: did you mean 'gradient_clipping'?" in found.notes


def test_a_yaml_of_accelerate(tmp_path: Path) -> None:
    file = written(tmp_path, "fsdp.yaml", samples.ACCELERATE)
    found = plan_from(file, ImportOptions(seq=2048, model=Model.load("qwen3-8b")))
    assert found.plan.layout == Layout(dp=16, zero=3, recompute="full")
    assert found.plan.job.cluster.nodes == 2
    assert any("has no batch: micro-batch 1" in note for note in found.notes)


def test_a_misspelled_setting_is_named_with_a_suggestion(tmp_path: Path) -> None:
    script = samples.MEGATRON.replace("--tensor-model-parallel-size", "--tensor-model-paralel-size")
    found = plan_from(written(tmp_path, "run.sh", script))
    assert "not read: --tensor-model-paralel-size: did you mean '--tensor-model-parallel-size'?" in found.notes
    assert found.plan.layout.tp == 1


def test_an_estimate_for_another_engine_can_be_requested(tmp_path: Path) -> None:
    from ultrascale.specs.framework import Framework

    found = plan_from(written(tmp_path, "run.sh", samples.MEGATRON), ImportOptions(framework=Framework.load("torchtitan")))
    assert found.plan.job.framework.name == "torchtitan"
    assert found.native is not None
    assert found.native.job.framework.name == "megatron-core"


CONTRADICTIONS = [
    (
        "run.sh",
        samples.MEGATRON.replace("--global-batch-size=256", "--global-batch-size=250"),
        "--global-batch-size is 250.*try 248",
    ),
    ("run.sh", samples.MEGATRON.replace("--bf16", "--bf16 --fp16"), "--bf16 and --fp16 at once"),
    ("run.sh", samples.MEGATRON.replace("TP=4", "TP=3"), "cuts the model over 6 GPUs but there are 32"),
    ("run.sh", samples.MEGATRON.replace("TP=4", "TP=four"), "--tensor-model-parallel-size is 'four'.*whole number"),
    ("run.sh", samples.MEGATRON.replace("--vocab-size 128256", ""), "how many tokens there are: add --vocab-size"),
    ("a.yaml", samples.NANOTRON.replace("tp: 2", "tp: 3"), "layout.tp is 3 but must divide heads"),
    ("a.yaml", samples.NANOTRON.replace("pp_engine: 1f1b", "pp_engine: 1f1"), "pp_engine is '1f1'.*did you mean 1f1b"),
    ("a.yaml", samples.NANOTRON.replace("zero_stage: 1", "zero_stage: 7"), "layout.zero is 7 but must be at most 3"),
    ("d.json", samples.DEEPSPEED.replace("256", "250"), "train_batch_size is 250 but micro-batch 4 times 8 steps.*try 32"),
    (
        "d.json",
        samples.DEEPSPEED.replace('"train_batch_size": 256', '"train_batch_size": "auto"'),
        "is 'auto'.*write the number",
    ),
    ("f.yaml", samples.ACCELERATE.replace("FSDP", "TPU"), "distributed_type is 'TPU'"),
    ("f.yaml", samples.ACCELERATE.replace("num_processes: 16", "num_processes: many"), "num_processes is 'many'"),
]


@pytest.mark.parametrize(("name", "text", "says"), CONTRADICTIONS, ids=[says[:30] for _, _, says in CONTRADICTIONS])
def test_values_that_contradict_each_other_are_refused(tmp_path: Path, name: str, text: str, says: str) -> None:
    file = written(tmp_path, name, text)
    own = name == "run.sh" or name == "a.yaml"
    with pytest.raises(SpecError, match=says) as refused:
        plan_from(file, ImportOptions() if own else ImportOptions(seq=2048, model=Model.load("llama-3-8b")))
    assert "\n" not in str(refused.value)


HEADERS = [
    ("layout.tpp = 2", "'layout.tpp', which is no field of a plan: did you mean 'layout.tp'"),
    ("layout.zero = {", "neither a word nor JSON"),
    ('job.cluster = "/etc/passwd"', "job.cluster is '/etc/passwd' but must name GPUs"),
    ("job.cluster = 8xh10", "gpu 'h10' is not a known kind"),
    ("layout.dp = x", "layout.dp is 'x' but must be a whole number"),
    ("job.seq = long", "job.seq is 'long' in the file's header"),
    ("layout.mbs = -1", "layout.mbs is -1"),
]


@pytest.mark.parametrize(("line", "says"), HEADERS, ids=[line for line, _ in HEADERS])
def test_a_broken_header_is_a_clear_error(tmp_path: Path, line: str, says: str) -> None:
    file = written(tmp_path, "config.yaml", f"# kept for import: {line}\n{samples.NANOTRON}")
    with pytest.raises(SpecError) as refused:
        plan_from(file)
    assert says in str(refused.value)
