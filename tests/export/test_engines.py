"""The files that export writes, read by the engines' own parsers where they are installed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import yaml
from plans_made import PLANS, exported, plan_of

from ultrascale.specs.plan import Plan

NAMES = list(PLANS)


def installed(package: str, release: str = "") -> None:
    try:
        found = version(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    if not found.startswith(release):
        pytest.skip(f"{package} is {found}, this file is for {release}")


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_loads_its_configuration(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("accelerate")
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
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    from deepspeed.runtime import config as deepspeed

    monkeypatch.setattr(deepspeed.dist, "get_rank", lambda: 0)  # else it takes itself for alone
    plan = plan_of(name)
    layout = plan.layout

    class Ranks:
        """What DeepSpeed asks a model-parallel program for."""

        def get_data_parallel_world_size(self) -> int:
            return layout.dp

    loaded = deepspeed.DeepSpeedConfig(str(exported(plan, "deepspeed", tmp_path) / "ds_config.json"), mpu=Ranks())
    assert (loaded.train_micro_batch_size_per_gpu, loaded.gradient_accumulation_steps) == (layout.mbs, layout.gas)
    assert loaded.zero_optimization_stage == layout.zero
    assert loaded.tensor_parallel_config.autotp_size in (layout.tp, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_torchtitan_0_3_builds_its_configuration(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("torchtitan", "0.3")
    from torchtitan.config.manager import ConfigManager

    plan = plan_of(name)
    if plan.job.precision == "fp8":
        pytest.skip("torchtitan builds float8 layers only where a GPU has them")
    monkeypatch.syspath_prepend(str(exported(plan, "torchtitan", tmp_path)))
    sys.modules.pop("ultrascale_config", None)
    config: Any = ConfigManager().parse_args(["--module", "ultrascale_config", "--config", "plan"])
    found, layout = config.parallelism, plan.layout
    ranks = found.data_parallel_replicate_degree * found.data_parallel_shard_degree
    assert (ranks, found.tensor_parallel_degree, found.pipeline_parallel_degree) == (layout.dp, layout.tp, layout.pp)
    assert config.training.global_batch_size == plan.job.sequences


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_torchtitan_0_2_loads_its_toml(name: str, tmp_path: Path) -> None:
    installed("torchtitan", "0.2")
    from torchtitan.config import ConfigManager

    plan = plan_of(name)
    file = exported(plan, "torchtitan", tmp_path) / "config.toml"
    config = ConfigManager().parse_args(["--job.config_file", str(file)])
    assert config.parallelism.tensor_parallel_degree == plan.layout.tp
    assert config.training.global_batch_size == plan.job.sequences


@pytest.mark.slow
@pytest.mark.parametrize("module", ["llama3", "qwen3", "deepseek_v3"])
def test_flavors_are_the_presets(module: str) -> None:
    installed("torchtitan", "0.3")
    from ultrascale.export.torchtitan_read import FLAVORS
    from ultrascale.specs.model import Model

    models = importlib.import_module(f"torchtitan.models.{module}")
    for (name, flavor), preset in FLAVORS.items():
        if name != module:
            continue
        theirs, ours = models.model_registry(flavor).model, Model.load(preset)
        assert (theirs.dim, len(theirs.layers), theirs.vocab_size) == (ours.hidden, ours.layers, ours.vocab), flavor
        assert getattr(theirs, "enable_weight_tying", False) == ours.tied_embeddings, flavor


@pytest.mark.parametrize("name", NAMES)
def test_megatron_core_takes_the_shape_and_the_cut(name: str, tmp_path: Path) -> None:
    """The arguments that become Megatron-Core's configuration, in its own class."""
    installed("megatron-core")
    import torch
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    from ultrascale.export.megatron_read import parse

    plan = plan_of(name)
    given = parse((exported(plan, "megatron", tmp_path) / "run.sh").read_text(), "run.sh").arguments
    fields = {key[2:].replace("-", "_"): value for key, value in given.items()}
    fields["num_moe_experts"] = fields.pop("num_experts", None)
    cls = MLATransformerConfig if "multi_latent_attention" in fields else TransformerConfig
    known = {field: value for field, value in fields.items() if field in cls.__dataclass_fields__}
    numbers = {field: _number(value) for field, value in known.items() if field not in ("moe_layer_freq", "cp_comm_type")}
    for field in ("pipeline_model_parallel_layout", "attention_backend", "window_size", "recompute_granularity", "fp8_recipe"):
        numbers.pop(field, None)
    numbers["add_bias_linear"] = "disable_bias_linear" not in fields
    numbers |= {"pipeline_dtype": torch.bfloat16, "bf16": True, "params_dtype": torch.bfloat16, "fp16": False}
    config = cls(**numbers)
    assert config.tensor_model_parallel_size == plan.layout.tp
    if "--pipeline-model-parallel-layout" in given:
        stages = PipelineParallelLayerLayout.from_str(given["--pipeline-model-parallel-layout"], plan.layout.pp)
        stages.validate_layer_layout(plan.job.model.layers, None)


def _number(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return int(value)
    except ValueError:
        try:
            return float(value)
        except ValueError:
            return value


@pytest.mark.parametrize("name", ["dense", "one GPU"])
def test_kubeflow_takes_the_train_job_and_the_job_set(name: str, tmp_path: Path) -> None:
    installed("kubeflow-trainer-api")
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

    plan: Plan = plan_of(name)
    folder = exported(plan, "kubernetes", tmp_path)
    for file, cls in (("trainjob.yaml", TrainerV1alpha1TrainJob), ("jobset.yaml", JobsetV1alpha2JobSet)):
        _, data = yaml.safe_load_all((folder / file).read_text())
        # from_dict drops what it does not know: what goes in must come out.
        assert json.loads(cls.from_dict(data).to_json()) == data
