"""Layout: its sizes, its short form, its mapping, and its fields as text on a command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.specs import layout as specs
from ultrascale.specs.errors import SpecError
from ultrascale.specs.layout import Layout, field_value
from ultrascale.specs.validate import build

T = TypeVar("T")
DEGREES = st.integers(1, 64)
LAYOUTS = st.builds(
    Layout,
    dp=DEGREES,
    tp=DEGREES,
    pp=DEGREES,
    cp=DEGREES,
    ep=DEGREES,
    mbs=DEGREES,
    gas=DEGREES,
    zero=st.integers(0, 3),
    zero_shards=st.none() | DEGREES,
    keep_gathered=st.booleans(),
    sequence_parallel=st.booleans(),
    data_parallel=st.sampled_from(get_args(specs.DataParallel)),
    context_parallel=st.sampled_from(get_args(specs.ContextParallel)),
    schedule=st.sampled_from(get_args(specs.ScheduleName)),
    virtual_stages=st.integers(1, 16),
    recompute=st.sampled_from(get_args(specs.Recompute)),
    offload=st.sampled_from(get_args(specs.Offload)),
)
ANYTHING = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers(), max_size=2)


def attempt(make: Callable[[], T]) -> tuple[T | None, str | None]:
    """The object, or the SpecError's message; any other exception fails the test."""
    try:
        return make(), None
    except SpecError as error:
        return None, str(error)


def test_sizes_are_the_playbooks() -> None:
    layout = Layout(dp=4, tp=2, pp=2, cp=2, mbs=3, gas=5)
    assert (layout.gpus, layout.data_ranks) == (32, 8)
    assert layout.batch_tokens(1024) == 3 * 4 * 5 * 1024
    assert (layout.shards, Layout(dp=4, zero_shards=2).shards, Layout(dp=4, zero_shards=64).shards) == (8, 2, 4)


@given(LAYOUTS)
def test_a_layout_survives_its_mapping(layout: Layout) -> None:
    assert build(Layout, layout.model_dump(mode="json"), "layout") == layout
    assert {layout: 1}[layout.changed()] == 1


@given(LAYOUTS)
def test_every_field_survives_as_text(layout: Layout) -> None:
    for field, value in layout:
        assert field_value(field, str(value)) == value


@given(LAYOUTS)
def test_the_short_form_names_every_degree_above_one(layout: Layout) -> None:
    words = str(layout).split()
    for axis in ("dp", "tp", "pp", "cp", "ep"):
        assert (f"{axis}{getattr(layout, axis)}" in words) == (getattr(layout, axis) > 1 or (axis, words[0]) == ("dp", "dp1"))
    assert f"mbs{layout.mbs}·gas{layout.gas}" in words


@settings(max_examples=200)
@given(st.dictionaries(st.sampled_from([*Layout.model_fields, "tpp", ""]), ANYTHING, max_size=5))
def test_any_mapping_is_a_layout_or_an_error(data: dict[str, Any]) -> None:
    layout, sentence = attempt(lambda: build(Layout, data, "layout"))
    if layout is None:
        assert str(sentence).startswith("layout")
    else:
        assert all(getattr(layout, name) == value for name, value in data.items())


@settings(max_examples=200)
@given(st.sampled_from(sorted(Layout.model_fields)), st.text(max_size=10))
def test_any_text_is_a_value_or_an_error(field: str, text: str) -> None:
    layout, sentence = attempt(lambda: build(Layout, {field: field_value(field, text)}, "layout"))
    assert layout or str(sentence).startswith(f"layout.{field} is ")


@pytest.mark.parametrize(
    ("field", "text", "says"),
    [
        ("tp", "abc", "layout.tp is 'abc' but must be a whole number, such as tp=2"),
        ("tp", "0", "layout.tp is 0 but must be at least 1: try 1"),
        ("zero", "4", "layout.zero is 4 but must be at most 3: try 0"),
        ("tpp", "1", "layout has no field 'tpp': did you mean 'tp' or 'pp'?"),
        ("TP", "1", "layout has no field 'TP': did you mean 'tp'"),
        ("schedule", "1f1", "layout.schedule is '1f1' but must be one of afab, 1f1b,"),
        ("sequence_parallel", "maybe", "layout.sequence_parallel is 'maybe' but must be true or false"),
        ("gas", "9" * 5000, "layout.gas is '999"),
    ],
)
def test_a_wrong_value_has_an_error(field: str, text: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        field_value(field, text)
    assert str(caught.value).startswith(says)
    assert len(str(caught.value)) < 300


def test_values_are_case_insensitive_and_shards_optional() -> None:
    assert field_value("schedule", "1F1B") == "1f1b"
    assert field_value("sequence_parallel", "No") is False
    assert field_value("zero_shards", "all") is None
