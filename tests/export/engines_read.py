"""The files that export writes, read by the engines' own parsers.

The dev extra brings the engines: where one is missing, its tests fail.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from plan_builders import PLANS, exported, plan_of

from ultrascale.specs.plan import Plan

NAMES = list(PLANS)


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_loads_its_configuration(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    plan = plan_of(name)
    file = exported(plan, "accelerate", tmp_path) / "config.yaml"
    loaded = load_config_from_file(str(file))
    assert loaded.num_processes == plan.layout.gpus
    arguments = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    arguments, _, _ = _validate_launch_command(arguments)  # refuses keys and combinations that it does not know
    if loaded.distributed_type.value == "FSDP":
        from accelerate import ParallelismConfig

        mesh = {key.removeprefix("parallelism_config_"): value for key, value in loaded.parallelism_config.items()}
        mesh.pop("cp_comm_strategy", None)
        assert ParallelismConfig(**mesh).total_size == plan.layout.gpus


@pytest.mark.parametrize("name", NAMES)
def test_deepspeed_loads_its_configuration(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime import config as deepspeed

    plan = plan_of(name)
    layout = plan.layout
    monkeypatch.setattr(deepspeed.dist, "get_rank", lambda: 0)  # else it takes itself for alone
    monkeypatch.setattr(deepspeed.dist, "get_world_size", lambda: layout.gpus)

    class Ranks:
        """What DeepSpeed requires of a program with a pipeline."""

        def get_data_parallel_world_size(self) -> int:
            return layout.dp

    file = exported(plan, "deepspeed", tmp_path) / "ds_config.json"
    loaded = deepspeed.DeepSpeedConfig(str(file), mpu=Ranks() if layout.pp > 1 else None)
    assert (loaded.train_micro_batch_size_per_gpu, loaded.gradient_accumulation_steps) == (layout.mbs, layout.gas)
    assert loaded.zero_optimization_stage == layout.zero
    assert loaded.tensor_parallel_config.autotp_size in (layout.tp, 0)


@pytest.mark.parametrize("name", NAMES)
def test_torchtitan_0_3_builds_its_configuration(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.components.quantization import float8
    from torchtitan.config.manager import ConfigManager

    plan = plan_of(name)
    monkeypatch.setattr(
        float8, "has_cuda_capability", lambda major, minor: True
    )  # the plan's GPUs have float8, not this machine
    monkeypatch.syspath_prepend(str(exported(plan, "torchtitan", tmp_path)))
    sys.modules.pop("ultrascale_config", None)
    config: Any = ConfigManager().parse_args(["--module", "ultrascale_config", "--config", "plan"])
    found, layout = config.parallelism, plan.layout
    ranks = found.data_parallel_replicate_degree * found.data_parallel_shard_degree
    assert (ranks, found.tensor_parallel_degree, found.pipeline_parallel_degree) == (layout.dp, layout.tp, layout.pp)
    assert config.training.global_batch_size == plan.job.sequences


def test_torchtitan_0_2_loads_its_toml(tmp_path: Path) -> None:
    """In a process of its own: the dev extra has 0.3, and `make` puts 0.2 beside it."""
    beside = Path(sys.prefix) / "torchtitan-0.2"
    if not beside.exists():
        pytest.skip(f"torchtitan 0.2 is not in {beside}: `make test-slow` puts it there")
    plans = [plan_of(name) for name in NAMES]
    files = [exported(plan, "torchtitan", tmp_path / str(at), "toml") / "config.toml" for at, plan in enumerate(plans)]
    program = Path(__file__).with_name("torchtitan_0_2.py")
    done = subprocess.run(
        [sys.executable, program, *files], env={**os.environ, "PYTHONPATH": str(beside)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for plan, one in zip(plans, found, strict=True):
        assert one.pop("version") == "0.2.2"
        axes = {axis: getattr(plan.layout, axis) for axis in ("dp", "tp", "pp", "cp")}
        assert one == axes | {"batch": plan.job.sequences, "seq": plan.job.seq}


@pytest.mark.parametrize("module", ["llama3", "qwen3", "deepseek_v3"])
def test_flavors_are_the_presets(module: str) -> None:
    """Built by torchtitan on the meta device: the same shape, and the same number of parameters to the digit."""
    import torch

    from ultrascale.export.torchtitan import FLAVORS
    from ultrascale.specs.model import Model

    models = importlib.import_module(f"torchtitan.models.{module}")
    for (name, flavor), preset in FLAVORS.items():
        if name != module:
            continue
        theirs, ours = models.model_registry(flavor).model, Model.load(preset)
        assert (theirs.dim, len(theirs.layers), theirs.vocab_size) == (ours.hidden, ours.layers, ours.vocab), flavor
        assert getattr(theirs, "enable_weight_tying", False) == ours.tied_embeddings, flavor
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in theirs.build().parameters())
        if ours.moe is not None and ours.moe.router_bias:
            count += (ours.layers - ours.moe.dense_layers) * ours.moe.experts  # buffers there
        assert count == ours.parameters, flavor


@pytest.mark.parametrize("name", NAMES)
def test_megatron_core_accepts_shape_and_parallelism(name: str, tmp_path: Path) -> None:
    """The arguments that become Megatron-Core's configuration, in its own class."""
    import torch
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron_built import number

    from ultrascale.export.megatron import parse

    plan = plan_of(name)
    given = parse((exported(plan, "megatron", tmp_path) / "run.sh").read_text(), "run.sh")
    fields = {key[2:].replace("-", "_"): value for key, value in given.items()}
    fields["num_moe_experts"] = fields.pop("num_experts", None)
    cls = MLATransformerConfig if "multi_latent_attention" in fields else TransformerConfig
    known = {field: value for field, value in fields.items() if field in cls.__dataclass_fields__}
    numbers = {field: number(value) for field, value in known.items() if field not in ("moe_layer_freq", "cp_comm_type")}
    for field in ("pipeline_model_parallel_layout", "attention_backend", "window_size", "recompute_granularity", "fp8_recipe"):
        numbers.pop(field, None)
    numbers["add_bias_linear"] = "disable_bias_linear" not in fields
    numbers |= {"pipeline_dtype": torch.bfloat16, "bf16": True, "params_dtype": torch.bfloat16, "fp16": False}
    config = cls(**numbers)
    assert config.tensor_model_parallel_size == plan.layout.tp
    if "--pipeline-model-parallel-layout" in given:
        stages = PipelineParallelLayerLayout.from_str(given["--pipeline-model-parallel-layout"], plan.layout.pp)
        stages.validate_layer_layout(plan.job.model.layers, None)


@pytest.mark.parametrize("name", ["dense", "one GPU"])
def test_kubeflow_accepts_the_train_job_and_the_job_set(name: str, tmp_path: Path) -> None:
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

    plan: Plan = plan_of(name)
    folder = exported(plan, "kubernetes", tmp_path)
    for file, cls in (("trainjob.yaml", TrainerV1alpha1TrainJob), ("jobset.yaml", JobsetV1alpha2JobSet)):
        _, data = yaml.safe_load_all((folder / file).read_text())
        # from_dict drops what it does not know: what goes in must come out.
        assert json.loads(cls.from_dict(data).to_json()) == data
