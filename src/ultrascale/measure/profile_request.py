"""What is to be profiled: which run, which of its steps. Said before torch is loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ultrascale.specs.errors import SpecError
from ultrascale.train.request import Request, from_words

WAIT, WARM_UP = 2, 1
"""steps before those that are recorded: in the first kernels are compiled, in the second memory is followed; then the profiler
starts, whose own first step is slow"""


def check(words: Sequence[str], traces: Sequence[Path], plan: Path | None) -> None:
    """A run or traces, one of them."""
    if bool(words) == bool(traces):
        raise SpecError(
            "profile takes a plan to run, or --trace: try `ultrascale profile plan.yaml`, or `profile --trace runs/x`"
        )
    if plan is not None and not traces:
        raise SpecError("--plan goes with --trace: a plan to run is named alone, `ultrascale profile plan.yaml`")


def request(words: Sequence[str], steps: int, world: int | None, gpu: bool) -> Request:
    """The run, with the steps before those that are recorded; nothing is kept of it but what was seen."""
    if "=" in words[0]:
        raise SpecError(f"{words[0]!r} changes a plan but none is named: try `ultrascale profile plan.yaml {words[0]}`")
    if any(word.startswith("train.steps") for word in words):
        raise SpecError("train.steps is what --steps says here, and some steps before those that are recorded: leave it out")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler speaks of itself on the error stream otherwise
    return from_words(words, {"train.steps": WAIT + WARM_UP + steps, "checkpoint.save": "false"}, world, gpu)
