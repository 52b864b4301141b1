"""The batch-size ramp: steps and tokens of each stage, worked by hand, and what is no ramp."""

from __future__ import annotations

import pytest

from ultrascale.specs.batch_ramp import BatchRamp, RampStage, parse
from ultrascale.specs.errors import SpecError
from ultrascale.specs.training import Training, training_value


def test_llama_3s_batches() -> None:
    """Section 3.4.1: 4M tokens of 4,096, 8M of 8,192 from 252M on, 16M from 2.87T on; here with one length."""
    ramp = BatchRamp.of(training_value("batch_ramp", "4M:252M,8M:2.87T"), 8192, 2048)
    first = 61  # 252,000,000 / 4,194,304 = 60.08
    second = 342_101  # (2.87e12 − 61 · 4,194,304) / 8,388,608 = 342,100.2
    assert ramp.stages == (
        RampStage(0, 0, 512, 8192),
        RampStage(first, first * 512, 1024, 8192),
        RampStage(first + second, first * 512 + second * 1024, 2048, 8192),
    )
    assert ramp.tokens_before(first) == first * 2**22
    assert [ramp.tokens(step) for step in (0, 60, 61, ramp.end - 1, ramp.end)] == [2**22, 2**22, 2**23, 2**23, 2**24]


def test_tokens_are_the_sum_of_the_batches() -> None:
    ramp = BatchRamp.of("32:100,64:101,96:1000", 16, 10)
    batches = [ramp.sequences(step) for step in range(20)]
    assert batches == [2] * 4 + [6] * 10 + [10] * 6  # 4 · 32 > 101: the second stage has no step
    assert [ramp.sequences_before(step) for step in range(20)] == [sum(batches[:step]) for step in range(20)]
    assert (ramp.end, ramp.divisor) == (14, 2)
    assert str(ramp) == "32 for 4 steps, 96 for 10 steps, then 160"


def test_without_a_ramp_all_batches_are_alike() -> None:
    ramp = BatchRamp.of(None, 16, 10)
    assert (ramp.end, ramp.divisor, ramp.tokens_before(7)) == (0, 10, 7 * 160)


@pytest.mark.parametrize("step", [1, 3, 4, 9, 14, 17])
def test_the_steps_so_far_are_kept_before_a_larger_batch(step: int) -> None:
    ramp = BatchRamp.of("32:100,96:1000", 16, 10)
    longer = BatchRamp.of(ramp.through(step), 16, 40)
    assert [longer.sequences(number) for number in range(step)] == [ramp.sequences(number) for number in range(step)]
    assert longer.end == step


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("4M", "has the stage '4M' but a stage is BATCH:UNTIL"),
        ("4M:252M,", "has the stage '' but"),
        ("x:3", "batch is 'x' but must be a whole number"),
        ("4k:0", "limit is '0' but must be at least 1"),
        ("4k:10k,2k:20k", "has 2048:20000 after 4096:10000 but batches and limits must grow: try 4096:10000,8192:20000"),
        ("2k:20k,4k:10k", "has 4096:10000 after 2048:20000 but batches and limits must grow: try 2048:20000,4096:40000"),
    ],
)
def test_what_is_no_ramp(given: str, problem: str) -> None:
    with pytest.raises(SpecError, match=r"train\.batch_ramp") as error:
        Training().changed(batch_ramp=given)
    assert problem in str(error.value)
    if ": try " in problem:
        assert len(parse(problem.rpartition(": try ")[2], "train.batch_ramp")) == 2


def test_the_batch_that_is_measured_is_that_of_two_steps() -> None:
    """Steps 0 to 1, 2 to 3, and from 4."""
    ramp = BatchRamp.of("32:64,64:192", 16, 8)
    assert [ramp.first_measured(0, end) for end in (1, 2, 3, 4, 5, 6)] == [0, 0, 0, 2, 2, 4]
    assert [ramp.first_measured(start, 6) for start in (3, 5)] == [4, 5]


def test_stages_of_sequence_length_share_the_batches() -> None:
    """Of windows of 16 tokens: batches of 2 until 100 tokens, then of 10; sequences of 4 tokens until 64, of 8 until 500."""
    ramp = BatchRamp.of("32:100", 16, 10, "4:64,8:500")
    plain = BatchRamp.of("32:100", 16, 10)
    assert [ramp.at(step).seq for step in range(9)] == [4, 4, 8, 8, 8, 8, 8, 16, 16]  # 128 tokens before step 4, 448 before 6
    assert [ramp.sequences_before(step) for step in range(9)] == [plain.sequences_before(step) for step in range(9)]
    assert (ramp.end, ramp.divisor) == (7, 2)
    assert str(ramp) == "32 for 4 steps, then 160"
    assert ramp.lengths == "4 for 2 steps, 8 for 5 steps, then 16"
    assert ramp.through(6) == plain.through(6)
    assert BatchRamp.of(None, 16, 10, "4:1,8:2").lengths == "4 for 1 step, then 16"
    with pytest.raises(
        SpecError, match=r"train\.seq_stages has 8:20 after 16:10 but lengths and limits must grow: try 16:10,32:20"
    ):
        Training().changed(seq_stages="16:10,8:20")
