"""Numbers as people write them, and back into words."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultrascale.specs.errors import SpecError
from ultrascale.specs.units import count, duration_days, gib, money, seconds, tokens, total_tokens, usd


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4M", 4 * 2**20),
        ("8k", 8192),
        ("8K", 8192),
        ("1g", 2**30),
        ("0.5M", 2**19),
        ("1.5k", 1536),
        ("4e6", 4_000_000),
        ("4194304", 4_194_304),
        ("4,194,304", 4_194_304),
        ("4_194_304", 4_194_304),
        (" 4 M ", 4 * 2**20),
        (8192, 8192),
        ("9007199254740993", 2**53 + 1),  # a float would lose the last digit
    ],
)
def test_batches_and_contexts_are_binary(text: str | int, value: int) -> None:
    assert tokens(text, "--batch-tokens") == value


@pytest.mark.parametrize(("text", "value"), [("15T", 15 * 10**12), ("300B", 300 * 10**9), ("1.4T", 1_400_000_000_000)])
def test_data_sets_are_decimal(text: str, value: int) -> None:
    assert total_tokens(text, "--total-tokens") == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-1",
        "4Q",
        "4MM",
        "nan",
        "inf",
        "1e400",
        "1e-9",
        "1.5",
        "1,2",
        "1_",
        "_1",
        "٣",
        "1" * 70,
        True,
        1.5,
        None,
        2**63,
        0,
    ],
)
def test_what_is_no_whole_number_names_the_flag_and_an_example(text: Any) -> None:
    with pytest.raises(SpecError, match=r"^--seq is .*(try 8192 or 8k|try \d+)$"):
        tokens(text, "--seq", "8192 or 8k")


@given(st.integers(1, 2**62))
def test_a_whole_number_means_itself(value: int) -> None:
    assert tokens(str(value), "x") == tokens(f"{value:,}", "x") == tokens(f"{value:_}", "x") == tokens(value, "x") == value


@given(st.integers(1, 2**20), st.sampled_from("kmgKMG"))
def test_suffixes_multiply(value: int, suffix: str) -> None:
    assert tokens(f"{value}{suffix}", "x") == value * {"k": 2**10, "m": 2**20, "g": 2**30}[suffix.lower()]


@given(st.text(max_size=20))
def test_any_text_is_a_number_or_an_error(text: str) -> None:
    try:
        value, sentence = tokens(text, "x"), "x is "
    except SpecError as error:
        value, sentence = 1, str(error)
    assert value >= 1
    assert sentence.startswith("x is ")


def test_formatted_numbers_have_three_digits_and_a_unit() -> None:
    assert gib(3 * 2**30) == "3.00 GiB"
    assert (seconds(11.654), seconds(0.0123), seconds(4.2e-5), seconds(0)) == ("11.65 s", "12.3 ms", "42.0 µs", "0.00 s")
    assert (count(8.03e9), count(1.01e12), count(999), count(2e15)) == ("8.03 B", "1.01 T", "999", "2,000 T")
    assert (count(999.4e6), count(999.9e6), count(-999.9e6)) == ("999 M", "1 B", "-1 B")


@pytest.mark.parametrize(("text", "value"), [("30d", 30), ("12h", 0.5), ("2w", 14), (" 1.5 D ", 1.5)])
def test_durations_are_hours_days_or_weeks(text: str, value: float) -> None:
    assert duration_days(text, "--by") == value


@pytest.mark.parametrize("text", ["", "30", "0d", "0.0w", "-1d", "5m", "1e3d", "٣d", "nan", "9" * 70 + "d"])
def test_what_is_no_duration_names_the_flag_and_an_example(text: str) -> None:
    with pytest.raises(SpecError, match=r"^--by is .*: try 12h, 30d or 2w$"):
        duration_days(text, "--by")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2M$", 2e6),
        ("$500k", 5e5),
        ("2e6", 2e6),
        ("2,000,000", 2e6),
        ("1.5 m$", 1.5e6),
        ("3B", 3e9),
        ("2.5", 2.5),
        ("0.5$", 0.5),
    ],
)
def test_money_is_decimal(text: str, value: float) -> None:
    assert usd(text, "--budget") == value


@pytest.mark.parametrize("text", ["", "$", "0", "0$", "-1", "$$1", "$1$", "1€", "1Q", "nan", "inf", "1e99", "9" * 70])
def test_what_is_no_money_names_the_flag_and_an_example(text: str) -> None:
    with pytest.raises(SpecError, match=r"^--budget is .* but must be US dollars above zero: try 2M\$, 500k\$ or 2e6$"):
        usd(text, "--budget")


@given(st.floats(1, 1e12))
def test_money_for_reading_reads_back_within_its_three_digits(value: float) -> None:
    assert usd(money(value).replace(" ", ""), "x") == pytest.approx(value, rel=5.1e-3)


def test_money_has_three_digits_and_a_unit() -> None:
    assert [money(one) for one in (12.5, 999.7, 850_400, 999_700, 1_132_194)] == ["12.5 $", "1 k$", "850 k$", "1 M$", "1.13 M$"]
