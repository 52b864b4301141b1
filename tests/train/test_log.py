"""Metrics: lines that stay whole, resuming without a step twice, and what the screen shows."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from ultrascale.specs.batch_ramp import BatchRamp
from ultrascale.specs.layout import Layout
from ultrascale.train.log import MetricsLog, ProgressLine, StepRecord, batch_line, duration, progress_line

FIELDS = ["step", "tokens", "loss", "grad_norm", "lr", "tokens_per_s_per_gpu", "mfu", "peak_gib"]


def record(step: int = 12, **fields: Any) -> StepRecord:
    usual = {"tokens": 4096 * step, "loss": 2.3412, "grad_norm": 1.02, "lr": 3e-4, "tokens_per_s_per_gpu": 12_345.0}
    return StepRecord(**{"step": step, **usual, "mfu": 0.412, "peak_gib": 3.21, **fields})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_the_fields_in_order_and_is_on_disk_at_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "run")
    log.write(record(1, mfu=None))
    log.write(record(2, data_wait_s=0.001, skipped=False))
    first, second = lines(log.path)  # before close
    assert list(first) == FIELDS
    assert first["mfu"] is None
    assert (first["step"], first["tokens"]) == (1, 4096)
    assert list(second) == [*FIELDS, "data_wait_s", "skipped"]
    assert second["skipped"] is False
    log.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_values_are_null(tmp_path: Path, value: float) -> None:
    log = MetricsLog(tmp_path)
    log.write(record(loss=value, grad_norm=value, eval_loss=value))
    log.close()
    text = log.path.read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert [lines(log.path)[0][name] for name in ("loss", "grad_norm", "eval_loss")] == [None] * 3


def test_a_new_run_truncates_and_a_resumed_one_repeats_no_step(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for step in (1, 2, 3, 4):
        log.write(record(step, loss=1.0))
    log.close()
    with log.path.open("a") as file:
        file.write('{"step": 5, "lo')  # the process was ended here
    again = MetricsLog(tmp_path, resume_step=2)
    again.write(record(3, loss=2.0))
    again.write(record(4, loss=2.0))
    again.close()
    assert [(line["step"], line["loss"]) for line in lines(log.path)] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    MetricsLog(tmp_path).close()
    assert lines(log.path) == []


def test_resuming_without_a_file_creates_one(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, resume_step=6)
    log.write(record(7))
    log.close()
    assert [line["step"] for line in lines(log.path)] == [7]


def test_the_line_shows_what_is_known() -> None:
    assert progress_line(record(data_wait_s=0.0002), 200, 80) == (
        "step 12/200 · loss 2.341 · norm 1.02 · lr 3.0e-04 · 12.3k tokens/s/GPU · MFU 41.2 % · peak 3.21 GiB · "
        "data 0.2 ms · ETA 1 min 20 s"
    )
    bare = record(mfu=None, peak_gib=0.01, tokens_per_s_per_gpu=812.0, eval_loss=2.5, skipped=True)
    assert progress_line(bare, 200, None) == (
        "step 12/200 · loss 2.341 · eval 2.500 · norm 1.02 · lr 3.0e-04 · 812 tokens/s/GPU · peak 10.2 MiB · skipped"
    )


def test_a_nan_loss_is_shown() -> None:
    assert "loss nan" in progress_line(record(loss=math.nan), 20, None)


@pytest.mark.parametrize("width", [79, 60, 40])
def test_a_narrow_progress_line_keeps_what_matters(width: int) -> None:
    line = progress_line(record(data_wait_s=0.0002, eval_loss=2.1, expert_load=(1.5, 0.5)), 200, 80, width)
    assert len(line) <= max(width, 46)
    assert all(word in line for word in ("step 12/200", "loss 2.341", "tokens/s/GPU"))
    assert ("ETA" in line) == (width > 60)


@pytest.mark.parametrize(
    ("value_s", "text"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (80, "1 min 20 s"), (7500, "2 h 5 min"), (273_600, "3 d 4 h")]
)
def test_durations(value_s: float, text: str) -> None:
    assert duration(value_s) == text


def test_the_batch_in_sequences_and_tokens() -> None:
    assert batch_line(Layout(mbs=2, dp=2, gas=2), 512) == "batch: 8 sequences × 512 = 4,096 tokens (mbs 2 × dp 2 × gas 2)"
    ramped = batch_line(Layout(mbs=2, dp=2, gas=2), 512, "2k:4k")
    assert ramped.endswith("; ramp: 2,048 for 2 steps, then 4,096 tokens a step")
    assert batch_line(Layout(), 128) == "batch: 1 sequence × 128 = 128 tokens (mbs 1 × dp 1 × gas 1)"


def shown_steps(text: str) -> list[int]:
    return [int(line.removeprefix("step ").split("/")[0]) for line in text.splitlines()]


def test_a_pipe_gets_the_first_steps_every_tenth_part_and_the_last() -> None:
    stream = io.StringIO()
    progress = ProgressLine(stream, total=52)
    for step in range(1, 53):
        progress.show(record(step))
    assert shown_steps(stream.getvalue()) == [1, 2, 3, 4, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 52]


def test_a_resumed_run_shows_its_own_first_steps() -> None:
    stream = io.StringIO()
    progress = ProgressLine(stream, total=100)
    for step in range(71, 78):
        progress.show(record(step))
    assert shown_steps(stream.getvalue()) == [71, 72, 73, 74, 75]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_line_is_redrawn_twice_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    seconds = iter(0.125 * step for step in range(1, 17))
    stream = Terminal()
    progress = ProgressLine(stream, total=16, clock=lambda: next(seconds))
    for step in range(1, 17):
        progress.show(record(step))
    text = stream.getvalue()
    drawn = text.removesuffix("\n").split("\r")[1:]
    assert [int(one.removeprefix("step ").split("/")[0]) for one in drawn] == [1, 5, 9, 13, 16]
    assert all(len(one.removesuffix("\x1b[K")) < 60 for one in drawn)
    assert text.count("\n") == 1
    progress.close()
    assert stream.getvalue() == text
    early = ProgressLine(stream := Terminal(), total=16)
    early.show(record(1))
    early.close()
    assert stream.getvalue().endswith("\n")


def test_the_time_left_is_the_mean_of_recent_steps() -> None:
    seconds = iter([0.0, 30.0, 40.0, 50.0])  # the first step compiled
    stream = io.StringIO()
    progress = ProgressLine(stream, total=4, clock=lambda: next(seconds))
    for step in (1, 2, 3, 4):
        progress.show(record(step, step_time_s=2.0))
    etas = [line.rsplit("ETA ", 1)[1] for line in stream.getvalue().splitlines()]
    assert etas == ["6 s", "1 min 0 s", "20 s", "0 s"]


def test_the_time_left_is_that_of_the_tokens_left() -> None:
    """Two steps of 4 and two of 16: 10 s for 4, so 90 s for 36, 80 s for 32, and 32 s for the last 16 after 40 s for 20."""
    seconds = iter([0.0, 10.0, 40.0, 80.0])
    ramp = BatchRamp.of("4:8", 1, 16)
    progress = ProgressLine(stream := io.StringIO(), total=4, work=ramp.tokens_before, clock=lambda: next(seconds))
    for step in (1, 2, 3, 4):
        progress.show(record(step, step_time_s=10.0))
    etas = [line.rsplit("ETA ", 1)[1] for line in stream.getvalue().splitlines()]
    assert etas == ["1 min 30 s", "1 min 20 s", "32 s", "0 s"]
