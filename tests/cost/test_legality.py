"""Legality: every rule is broken once; its sentence names the field, what was given and a value that works."""

from __future__ import annotations

import re
from typing import Any

import pytest

from builders import make_job
from ultrascale.cost.columns import LayoutColumns
from ultrascale.cost.legality import RULES, check, legal_rows, problem
from ultrascale.specs.errors import SpecError, divisors, near
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout


def broken(of: Job, layout: Layout) -> list[int]:
    row = LayoutColumns.of([layout])
    return [index for index, rule in enumerate(RULES) if not rule.holds(of, row)[0]]


# rule, job, layout, field named, value that was given, (suggested changes, each of which must mend the rule)
CASES: dict[str, tuple[int, Job, Layout, str, str, tuple[dict[str, Any], ...]]] = {
    "world": (0, make_job(), Layout(dp=4, gas=16), "dp·tp·pp·cp", "4·1·1·1 = 4", ({"dp": 8},)),
    "world, odd": (
        0,
        make_job(),
        Layout(dp=1, tp=3, gas=64),
        "dp·tp·pp·cp",
        "1·3·1·1 = 3",
        ({"tp": 2, "dp": 4}, {"tp": 4, "dp": 2}),
    ),
    "heads": (1, make_job(), Layout(tp=3), "layout.tp", "3", ({"tp": 2}, {"tp": 4})),
    "kv heads": (1, make_job("qwen2.5-0.5b"), Layout(tp=7), "layout.tp", "7", ({"tp": 2}, {"tp": 14})),
    "ffn": (2, make_job("qwen2.5-0.5b"), Layout(tp=14), "ffn = 4864", "14", ({"tp": 8}, {"tp": 16})),
    "zig-zag": (3, make_job(seq=8200), Layout(cp=8), "layout.cp", "8", ({"cp": 5}, {"cp": 10})),
    "slices": (3, make_job(seq=8190), Layout(cp=8, context_parallel="ring"), "layout.cp", "8", ({"cp": 7}, {"cp": 9})),
    "ulysses": (
        4,
        make_job(cluster="64xh100"),
        Layout(cp=16, tp=4, context_parallel="ulysses", gas=64),
        "layout.cp",
        "16",
        ({"context_parallel": "zigzag"},),
    ),
    "sequence": (
        5,
        make_job(seq=8196),
        Layout(tp=8, gas=64),
        "sequence_parallel",
        "tp = 8",
        ({"sequence_parallel": False}, {"tp": 6}, {"tp": 12}),
    ),
    "no experts": (6, make_job(), Layout(dp=8, ep=2, gas=8), "layout.ep", "2", ({"ep": 1},)),
    "experts": (6, make_job("mixtral-8x7b"), Layout(dp=8, ep=3, gas=8), "layout.ep", "3", ({"ep": 2}, {"ep": 4})),
    "layers": (
        7,
        make_job(cluster="64xh100"),
        Layout(pp=64, gas=64),
        "pp·virtual_stages",
        "64·1 = 64",
        ({"pp": 32},),
    ),
    "micro-batches": (8, make_job(batch=4), Layout(pp=8, gas=4), "layout.gas", "given 4", ({"gas": 8},)),
    "loops": (8, make_job(), Layout(pp=8, virtual_stages=2, gas=64), "virtual_stages", "given 2", ({"virtual_stages": 1},)),
    "rounds": (
        8,
        make_job(batch=20),
        Layout(pp=8, schedule="interleaved", virtual_stages=2, gas=21),
        "layout.gas",
        "given 21",
        ({"gas": 16}, {"gas": 24}),
    ),
    "no pipeline": (
        8,
        make_job(),
        Layout(dp=8, schedule="zb-v", virtual_stages=2, gas=8),
        "layout.schedule",
        "zb-v",
        ({"schedule": "1f1b", "virtual_stages": 1},),
    ),
    "batch": (9, make_job(), Layout(dp=8, gas=4), "dp·mbs·gas", "8·1·4 = 32", ({"gas": 8},)),
    "shards": (
        10,
        make_job(),
        Layout(dp=8, gas=8, zero=3, zero_shards=3),
        "zero_shards",
        "3",
        ({"zero_shards": 2}, {"zero_shards": 4}),
    ),
    "shards of nothing": (10, make_job(), Layout(dp=8, gas=8, zero_shards=4), "zero_shards", "4", ({"zero": 1},)),
    "gathered": (
        11,
        make_job(),
        Layout(dp=8, gas=8, zero=2, keep_gathered=True),
        "keep_gathered",
        "zero is 2",
        ({"keep_gathered": False}, {"zero": 3}),
    ),
    "offload": (
        12,
        make_job(),
        Layout(dp=8, gas=8, zero=1, offload="parameters"),
        "offload",
        "zero is 1",
        ({"zero": 3}, {"offload": "optimizer"}),
    ),
    "ddp": (
        13,
        make_job(),
        Layout(dp=8, gas=8, zero=1, data_parallel="ddp"),
        "data_parallel",
        "zero is 1",
        ({"data_parallel": "bucketed"},),
    ),
    "recomputed layers of nothing": (
        14,
        make_job(),
        Layout(dp=8, gas=8, recompute_layers=4),
        "recompute_layers",
        "4",
        ({"recompute": "full"},),
    ),
    "more recomputed layers than a stage has": (
        14,
        make_job(),
        Layout(pp=8, gas=64, recompute="full", recompute_layers=5),
        "recompute_layers",
        "5",
        ({"recompute_layers": 4},),
    ),
    "optimizer in backward": (
        15,
        make_job(framework=Framework.load("eager").model_copy(update={"accumulation": "stepped"})),
        Layout(dp=8, gas=8),
        "gas",
        "8",
        ({"gas": 1},),
    ),
    "experts cut in other parts": (
        16,
        make_job("mixtral-8x7b"),
        Layout(dp=2, tp=4, ep=2, etp=2, gas=32),
        "layout.etp",
        "2",
        ({"etp": 1}, {"etp": 4}),
    ),
    "no experts to cut": (16, make_job(), Layout(dp=4, tp=2, etp=1, gas=16), "layout.etp", "1", ({"etp": None},)),
    "experts over ranks that have parts of them": (
        6,
        make_job("mixtral-8x7b"),
        Layout(dp=4, tp=2, ep=8, etp=2, gas=16),
        "layout.ep",
        "8",
        ({"ep": 4},),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_errors_name_field_value_and_a_fix(name: str) -> None:
    rule, of, layout, field, given, changes = CASES[name]
    assert rule in broken(of, layout)
    sentence = RULES[rule].sentence(of, layout)
    assert field in sentence
    assert given in sentence
    assert re.search(r"\btry |; use ", sentence)
    for change in changes:
        for value in change.values():
            assert str(value).lower().replace("none", "null") in sentence.split("but")[-1], sentence
        assert rule not in broken(of, layout.changed(**change)), (change, sentence)


def test_every_rule_is_broken_by_some_case() -> None:
    assert {case[0] for case in CASES.values()} == set(range(len(RULES)))


@pytest.mark.parametrize("name", CASES)
def test_check_raises_the_message_of_the_first_broken_rule(name: str) -> None:
    _, of, layout, *_ = CASES[name]
    with pytest.raises(SpecError) as error:
        check(of, layout)
    assert str(error.value) == problem(of, layout) == RULES[broken(of, layout)[0]].sentence(of, layout)
    assert not legal_rows(of, LayoutColumns.of([layout]))[0]


def test_a_batch_that_no_accumulation_reaches_names_reachable_ones() -> None:
    """8 replicas and 60 sequences: 56 or 64 can be cut. The sentence gives both in tokens, and both are legal."""
    of = make_job(batch=60)
    sentence = problem(of, Layout(dp=8, gas=8))
    assert sentence is not None
    offered = [int(number) for number in re.findall(r"\d+", sentence.split("try")[1])]
    assert offered == [56 * 8192, 64 * 8192]
    for batch, gas in zip(offered, (7, 8), strict=True):
        assert problem(of.changed(batch_tokens=batch), Layout(dp=8, gas=gas)) is None


def test_too_small_a_batch_names_the_least() -> None:
    of = make_job(batch=4)
    sentence = problem(of, Layout(dp=8))
    assert sentence is not None
    assert f"batch_tokens={8 * 8192}" in sentence
    assert problem(of.changed(batch_tokens=8 * 8192), Layout(dp=8)) is None


def test_legal_layouts_pass() -> None:
    assert problem(make_job(), Layout(dp=8, gas=8)) is None
    assert (
        problem(make_job(cluster="64xh100"), Layout(dp=2, tp=4, pp=4, cp=2, gas=32, schedule="interleaved", virtual_stages=2))
        is None
    )
    check(make_job("mixtral-8x7b"), Layout(dp=8, ep=8, zero=1, gas=8))


def test_divisors_and_neighbours() -> None:
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert divisors(1) == [1]
    assert divisors(97) == [1, 97]
    assert near(5, [1, 2, 4, 8]) == "4 or 8"
    assert near(16, [1, 2, 4, 8]) == "8"
    assert near(4, []) == "1"
