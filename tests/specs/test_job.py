"""Job: the batch in sequences, the precision the GPU has, positions the model has, and changes to one field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError
from ultrascale.specs.job import Job
from ultrascale.specs.model import Model
from ultrascale.specs.validate import build

T = TypeVar("T")
GPT2, H100 = Model.load("gpt2"), Cluster.load("8xh100")
ANYTHING = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers(), max_size=2)


def job(**fields: Any) -> Job:
    return build(Job, {"model": GPT2, "cluster": H100, "seq": 1024, "batch_tokens": 8192, **fields}, "job")


def attempt(make: Callable[[], T]) -> tuple[T | None, str | None]:
    """The object, or the SpecError's message; any other exception fails the test."""
    try:
        return make(), None
    except SpecError as error:
        return None, str(error)


@given(st.integers(1, 1024), st.integers(1, 2**40))
def test_a_batch_is_the_nearest_whole_number_of_sequences(seq: int, batch: int) -> None:
    sequences = job(seq=seq, batch_tokens=batch).sequences
    assert sequences >= 1
    assert sequences == 1 or abs(sequences * seq - batch) <= seq / 2


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"cluster": Cluster.load("8xa100"), "precision": "fp8"},
            "job.precision is fp8 but a100-80 does not compute in it: try",
        ),
        ({"cluster": Cluster.load("8xv100")}, "job.precision is bf16 but v100 does not compute in it: try fp32 or fp16"),
        ({"seq": 2048}, "job.seq is 2048 but gpt2 has 1024 learned positions: try 1024"),
        ({"seq": 0}, "job.seq is 0 but must be at least 1: try 8192"),
        ({"batch_tokens": 2**41}, f"job.batch_tokens is {2**41} but must be at most {2**40}: try 4194304"),
        ({"batch_tokens": "4M"}, "job.batch_tokens is '4M' but must be a whole number"),
        ({"optimizer": "adam"}, "job.optimizer is 'adam' but must be"),
        ({"batch_token": 1}, "job.batch_token is not a field of job: did you mean 'batch_tokens'"),
        ({"dropout": "yes"}, "job.dropout is 'yes' but must be true or false: try false"),
    ],
)
def test_each_mistake_has_an_error(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as caught:
        job(**fields)
    assert str(caught.value).startswith(says)


def test_advised_precisions_are_valid() -> None:
    with pytest.raises(SpecError) as caught:
        job(cluster=Cluster.load("8xa100"), precision="fp8")
    advised = str(caught.value).split("try ")[1].split(" or ")
    assert advised == ["fp32", "fp16", "bf16"]
    for precision in advised:
        assert job(cluster=Cluster.load("8xa100"), precision=precision).peak_flops > 0


def test_one_field_changes_and_the_rest_stays() -> None:
    changed = job().changed(seq=512)
    assert (changed.seq, changed.batch_tokens, changed.model) == (512, 8192, GPT2)
    with pytest.raises(SpecError, match="job has no field 'sqe'"):
        job().changed(sqe=1)


@settings(max_examples=200)
@given(st.dictionaries(st.sampled_from([*Job.model_fields, "sequence"]), ANYTHING, max_size=5))
def test_any_mapping_is_a_job_or_an_error(data: dict[str, Any]) -> None:
    built, sentence = attempt(lambda: job(**data))
    assert built.sequences >= 1 if built else str(sentence).startswith("job")


@settings(max_examples=200)
@given(st.dictionaries(st.sampled_from([*Model.model_fields, "layer"]), ANYTHING, max_size=6))
def test_any_mapping_is_a_model_or_an_error(data: dict[str, Any]) -> None:
    built, sentence = attempt(lambda: build(Model, {**dict(GPT2), **data}, "model"))
    assert built.parameters > 0 if built else str(sentence).startswith("model")
