"""What quickstart says of a machine that has changed since it was measured."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from builders import make_job, with_constants
from ultrascale.cost.estimate import estimate
from ultrascale.show.compare import show_drift
from ultrascale.specs.layout import Layout
from ultrascale.specs.units import seconds


@pytest.mark.parametrize(("rate", "words"), [(0.5, "slower than"), (1.0, "about as fast as"), (2.0, "faster than")])
def test_the_prediction_is_repeated_with_the_rates_of_now(rate: float, words: str) -> None:
    layout = Layout(dp=8, zero=1)
    job = make_job("llama-3-8b", with_constants(8, matmul=1.0), 8192, layout)
    now = with_constants(8, matmul=rate)
    now_s = estimate(job.changed(cluster=now), layout).step_time_s
    console = Console(file=io.StringIO(), width=300)
    show_drift(console, job, layout, now, 2 * now_s)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert words in text
    assert f"would now be {seconds(now_s)} (-50%)" in text
