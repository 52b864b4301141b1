"""The batch-size ramp: how many sequences each step has, and how many tokens were trained on before it.

`train.batch_ramp=4M:252M,8M:2.87T` begins with batches of 4M tokens, goes on with 8M once 252M tokens were trained on, and
with the job's batch once 2.87T were (Llama 3, section 3.4.1). A stage's last batch is whole, and may pass its limit.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from ultrascale.specs import units
from ultrascale.specs.errors import SpecError
from ultrascale.specs.validate import shown

EXAMPLE = "4M:252M,8M:2.87T"


@dataclass(frozen=True)
class RampStage:
    """Steps with the same batch."""

    step: int
    """its first, counted from 0"""
    before: int
    """sequences trained on before that step"""
    sequences: int
    """in each batch"""


@dataclass(frozen=True)
class BatchRamp:
    """The batches of a run; without a ramp, one stage."""

    seq: int
    stages: tuple[RampStage, ...]

    @classmethod
    def of(cls, ramp: str | None, seq: int, sequences: int) -> Self:
        """`ramp`: train.batch_ramp; `sequences`: in the batch after it."""
        stages, step, before = list[RampStage](), 0, 0
        for batch, until in parse(ramp, "train.batch_ramp"):
            size = max(1, batch // seq)
            steps = -(-(until - before * seq) // (size * seq))
            if steps > 0:  # a smaller batch may have passed this stage's limit too
                stages.append(RampStage(step, before, size))
                step, before = step + steps, before + steps * size
        return cls(seq, (*stages, RampStage(step, before, sequences)))

    def at(self, step: int) -> RampStage:
        """The stage of a step, counted from 0."""
        return self.stages[bisect_right(self.stages, step, key=lambda stage: stage.step) - 1]

    def sequences(self, step: int) -> int:
        """In the batch of this step."""
        return self.at(step).sequences

    def sequences_before(self, step: int) -> int:
        """Trained on when this many steps are done."""
        stage = self.at(step)
        return stage.before + (step - stage.step) * stage.sequences

    def tokens(self, step: int) -> int:
        return self.sequences(step) * self.seq

    def tokens_before(self, step: int) -> int:
        return self.sequences_before(step) * self.seq

    @property
    def end(self) -> int:
        """Steps of the ramp: the first step, counted from 0, with the whole batch."""
        return self.stages[-1].step

    def first_measured(self, start: int, end: int) -> int:
        """Of the steps from `start` to `end`, the first with the largest batch that two of them have; `start` if none has."""
        begins = [max(stage.step, start) for stage in self.stages] + [end]
        return max((one for one, two in pairwise(begins) if min(two, end) - one > 1), default=start)

    @property
    def divisor(self) -> int:
        """The largest number of sequences that divides every batch."""
        return math.gcd(*(stage.sequences for stage in self.stages))

    def through(self, step: int) -> str:
        """The value of train.batch_ramp that repeats the first steps and then has another batch."""
        done = [stage for stage in self.stages if stage.step < step]
        ends = [*(stage.before for stage in done[1:]), self.sequences_before(step)]
        return text((stage.sequences * self.seq, end * self.seq) for stage, end in zip(done, ends, strict=True))

    def __str__(self) -> str:
        """`4,194,304 tokens for 61 steps, then 8,388,608`"""
        spans = [(one.sequences * self.seq, two.step - one.step) for one, two in pairwise(self.stages)]
        words = [f"{tokens:,} for {steps:,} step{'s' * (steps > 1)}" for tokens, steps in spans]
        return ", ".join([*words, f"then {self.stages[-1].sequences * self.seq:,}"])


def parse(ramp: str | None, field: str) -> list[tuple[int, int]]:
    """Tokens of a batch, and tokens of the run until which steps have it; SpecError unless both grow from stage to stage."""
    stages = []
    for part in ramp.split(",") if ramp else ():
        size, colon, end = part.partition(":")
        if not colon:
            raise SpecError(
                f"{field} has the stage {shown(part.strip())} but a stage is BATCH:UNTIL, tokens of a batch and of the run: "
                f"try {EXAMPLE}"
            )
        stages.append((units.tokens(size, f"{field}'s batch"), units.total_tokens(end, f"{field}'s limit")))
    for (batch, until), (larger, later) in pairwise(stages):
        if larger <= batch or later <= until:
            works = larger if larger > batch else 2 * batch, later if later > until else 2 * until
            raise SpecError(
                f"{field} has {larger}:{later} after {batch}:{until} but batches and limits must grow: try "
                f"{text([(batch, until), works])}"
            )
    return stages


def stages_left(ramp: str | None, trained: int) -> str | None:
    """The ramp without the stages that are over when so many tokens were trained on."""
    return text(stage for stage in parse(ramp, "train.batch_ramp") if stage[1] > trained) or None


def text(stages: Iterable[tuple[int, int]]) -> str:
    return ",".join(f"{batch}:{until}" for batch, until in stages)
