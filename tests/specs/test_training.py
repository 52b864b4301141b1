"""Training: its defaults, its phases, and its fields as text on a command line."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ultrascale.specs.errors import SpecError
from ultrascale.specs.training import Training, training_value
from ultrascale.specs.validate import build


def test_defaults_are_a_small_pretraining_run() -> None:
    training = Training()
    assert (training.steps, training.lr, training.data, training.clip) == (100, 3e-4, "stdlib", 1.0)
    assert (training.beta1, training.beta2, training.eps, training.weight_decay) == (0.9, 0.95, 1e-8, 0.1)
    assert (training.warmup, training.decay_steps) == (10, 20)
    assert training.log == ()


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (9, 0), (10, 1), (20_000, 2000), (500_000, 2000)])
def test_the_usual_warm_up(steps: int, warmup: int) -> None:
    assert Training(steps=steps).warmup == warmup


def test_every_field_is_described() -> None:
    assert all(field.description for field in Training.model_fields.values())


def test_it_survives_a_yaml_round_trip() -> None:
    training = Training(steps=7, log=("wandb",), warmup_steps=2, lr=1e-3)
    assert build(Training, yaml.safe_load(yaml.safe_dump(training.model_dump(mode="json"))), "train") == training


def test_powers_of_ten_without_a_dot_are_numbers() -> None:
    assert build(Training, yaml.safe_load("lr: 1e-3\neps: 1e-10"), "train") == Training(lr=1e-3, eps=1e-10)
    with pytest.raises(SpecError, match=r"train.lr is '0.001' but must be a number greater than 0: try 0.0003"):
        build(Training, {"lr": "0.001"}, "train")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"warmup_steps": 100}, "train.warmup_steps is 100 but must be less than train.steps = 100: try 10"),
        ({"warmup_steps": 1, "steps": 1}, "train.warmup_steps is 1 but must be less than train.steps = 1: try 0"),
        ({"lr_schedule": "wsd", "decay_fraction": 0.95}, "95 steps of decay after 10 of warm-up .* try 0.45"),
        ({"stepz": 3}, "train.stepz is not a field of train: did you mean 'steps'"),
        ({"bucket_mb": 0}, "train.bucket_mb is 0 but must be greater than 0: try 25.0"),
        ({"beta1": 1.0}, "train.beta1 is 1.0 but must be less than 1: try 0.9"),
        ({"lr": float("nan")}, "train.lr is nan but must be a finite number"),
        ({"compress": "int4"}, "train.compress is 'int4' but must be 'none', 'bf16' or 'int8': did you mean 'int8'"),
        ({"log": "tensorbord"}, "train.log.0 is 'tensorbord' .* did you mean 'tensorboard'"),
        ({"log": 3}, "train.log is 3 but must be a list"),
    ],
)
def test_errors_name_a_value_that_works(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        build(Training, fields, "train")


def test_the_value_that_a_refusal_names_works() -> None:
    assert Training(lr_schedule="wsd", decay_fraction=0.45).decay_steps == 45
    assert Training(warmup_steps=0, steps=1).warmup == 0


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("steps", " 20 ", 20),
        ("lr", "1e-3", 1e-3),
        ("clip", "0", 0.0),
        ("warmup_steps", "none", None),
        ("warmup_steps", "500", 500),
        ("reduce_every_microbatch", "yes", True),
        ("lr_schedule", "WSD", "wsd"),
        ("compress", "none", "none"),
        ("log", "tensorboard,wandb", ("tensorboard", "wandb")),
        ("log", "wandb, wandb", ("wandb",)),
        ("log", "none", ()),
        ("log", "", ()),
        ("decay_fraction", "1", 1.0),
        ("eval_every", "500", 500),
        ("data", " Data/Web:0.7,stdlib:0.3 ", "Data/Web:0.7,stdlib:0.3"),
        ("eval_data", "data/held-out", "data/held-out"),
        ("eval_data", "none", None),
        ("document_mask", "on", True),
        ("balance_loss", "1e-2", 0.01),
        ("capacity_factor", "1.25", 1.25),
        ("capacity_factor", "none", None),
    ],
)
def test_text_becomes_a_value(field: str, text: str, value: Any) -> None:
    parsed = training_value(field, text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("field", "text", "sentence"),
    [
        ("stepz", "3", "train has no field 'stepz': did you mean 'steps'"),
        ("steps", "1e3", "train.steps is '1e3' but must be a whole number, such as steps=100"),
        ("steps", "0", "train.steps is 0 but must be at least 1"),
        ("lr", "fast", "train.lr is 'fast' but must be a number, such as lr=0.0003"),
        ("lr", "-1", "train.lr is -1.0 but must be greater than 0"),
        ("lr", "inf", "train.lr is inf but must be a finite number"),
        ("reduce_every_microbatch", "maybe", "must be true or false, such as reduce_every_microbatch=true"),
        ("data", " ", "train.data is '' but must be text that is not empty: try 'stdlib'"),
        ("eval_data", "", "train.eval_data is '' but must be text that is not empty"),
        ("document_mask", "some", "train.document_mask is 'some' but must be true or false"),
        ("compress", "zip", "must be one of none, bf16, int8: try compress=none"),
        ("log", "tb", "train.log.0 is 'tb' but must be 'tensorboard', 'wandb', 'trackio' or 'mlflow'"),
        ("warmup_steps", "few", "train.warmup_steps is 'few' but must be a whole number, such as warmup_steps=10"),
    ],
)
def test_text_that_is_no_value_is_refused(field: str, text: str, sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        training_value(field, text)


@given(field=st.sampled_from(sorted(Training.model_fields)), text=st.text(max_size=12))
def test_any_text_is_a_value_or_an_error(field: str, text: str) -> None:
    sentence = ""
    try:
        training_value(field, text)
    except SpecError as error:
        sentence = str(error)
    assert not sentence or sentence.startswith(f"train.{field}")


@given(field=st.sampled_from(sorted(Training.model_fields)))
def test_a_default_as_text_is_itself(field: str) -> None:
    default = getattr(Training(), field)
    text = ",".join(default) if isinstance(default, tuple) else str(default)
    assert training_value(field, text) == default


def test_changed_keeps_the_rest_and_is_checked() -> None:
    assert Training(seed=4).changed(steps=10) == Training(seed=4, steps=10)
    with pytest.raises(SpecError, match=r"train.warmup_steps is 20"):
        Training(warmup_steps=20).changed(steps=10)
