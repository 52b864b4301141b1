"""Published example configurations import: the layout that they run, and no setting passed over in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
from published import EXAMPLES, REGISTRY, Example

from ultrascale.export import megatron
from ultrascale.export.read import plan_from
from ultrascale.export.table import MAY_CHANGE, NOT_READ
from ultrascale.specs.errors import SpecError


def written(folder: Path, example: Example) -> Path:
    (folder / example.file.partition(":")[0]).write_text(example.text)
    return folder / example.file


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.source)
def test_a_published_example_imports(example: Example, tmp_path: Path) -> None:
    found = plan_from(written(tmp_path, example), example.given)
    assert found.plan.layout == example.layout
    assert found.plan.job.precision == example.precision
    assert found.plan.job.model.parameters / 1e9 == pytest.approx(example.parameters, rel=0.005)
    assert found.plan.estimate.step_time_s > 0
    assert not [note for note in found.notes if note.startswith(NOT_READ)]
    named = [note.removeprefix(MAY_CHANGE).split(", ") for note in found.notes if note.startswith(MAY_CHANGE)]
    assert sorted(key for keys in named for key in keys) == sorted(example.may_change)
    for words in example.notes:
        assert any(words in note for note in found.notes), words


def test_options_of_a_published_script_change_what_is_predicted(tmp_path: Path) -> None:
    """Each of these options is read: without it, the estimate is another."""
    example = next(one for one in EXAMPLES if "train_llama3_8b" in one.source)
    (tmp_path / "run.sh").write_text(example.text)
    before = plan_from(tmp_path / "run.sh").plan.estimate
    for option in ("--overlap-grad-reduce", "--use-distributed-optimizer", '"--fp8-format hybrid"', "--swiglu"):
        (tmp_path / "run.sh").write_text(example.text.replace(option, ""))
        after = plan_from(tmp_path / "run.sh").plan.estimate
        assert (after.step_time_s, after.peak_gib) != (before.step_time_s, before.peak_gib), option


FRAMEWORK = {
    "--tp-comm-overlap": ("tp_comm_overlap", True),
    "--no-gradient-accumulation-fusion": ("accumulation", "separate"),
    "--account-for-loss-in-pipeline-split": ("stage_split", "layers-and-head"),
    "--overlap-moe-expert-parallel-comm": ("expert_overlap", "microbatches"),
    "--moe-expert-capacity-factor 1.25": ("routing", "capacity"),
    "--fp8-param-gather": ("fp8_gather", True),
    "--transformer-impl local": ("transformer_engine", False),
}


@pytest.mark.parametrize("option", FRAMEWORK)
def test_an_option_of_megatron_sets_a_field_of_the_framework(option: str, tmp_path: Path) -> None:
    text = next(one for one in EXAMPLES if "mixtral" in one.source).text.replace("--tensor-model-parallel-size 1", "")
    (tmp_path / "run.sh").write_text(text.replace("${LOGS[@]}", "${LOGS[@]} --tensor-model-parallel-size 2 " + option))
    field, value = FRAMEWORK[option]
    assert getattr(plan_from(tmp_path / "run.sh").plan.job.framework, field) == value


DISPATCHERS = {
    "": "allgather",
    "--moe-token-dispatcher-type alltoall": "alltoall",
    "--moe-token-dispatcher-type flex": "deepep",
    "--moe-token-dispatcher-type flex --moe-enable-deepep": "deepep",
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep": "hybridep",
}


@pytest.mark.parametrize("options", DISPATCHERS)
def test_the_token_dispatcher_of_megatron_is_a_field_of_the_layout(options: str, tmp_path: Path) -> None:
    text = next(one for one in EXAMPLES if "mixtral" in one.source).text
    assert "--moe-token-dispatcher-type alltoall" in text
    (tmp_path / "run.sh").write_text(text.replace("--moe-token-dispatcher-type alltoall", options))
    assert plan_from(tmp_path / "run.sh").plan.layout.dispatcher == DISPATCHERS[options]


def test_one_of_several_configurations_is_named(tmp_path: Path) -> None:
    (tmp_path / "config_registry.py").write_text(REGISTRY)
    with pytest.raises(SpecError, match=r"has 2 configurations: name one, such as config_registry.py:llama3_8b"):
        plan_from(tmp_path / "config_registry.py")
    with pytest.raises(SpecError, match=r"no configuration 'llama3_9b'.*it has llama3_8b, llama3_405b"):
        plan_from(tmp_path / "config_registry.py:llama3_9b")


def test_arguments_that_are_no_mapping_are_refused() -> None:
    with pytest.raises(SpecError, match=r"MODEL_ARGS must be a mapping of arguments"):
        megatron.parse("MODEL_ARGS: [1]", "model_config.yaml")
