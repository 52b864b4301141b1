"""The batch-size ramp and the stages of sequence length: how many sequences each step has, how long they are, and how many
tokens were trained on before it.

`train.batch_ramp=4M:252M,8M:2.87T` begins with batches of 4M tokens, goes on with 8M once 252M tokens were trained on, and
with the job's batch once 2.87T were (Llama 3, section 3.4.1). A stage's last batch is whole, and may pass its limit.

`train.seq_stages=2k:1B` begins with sequences of 2k tokens, and goes on with those of the job once 1B tokens were trained on.
The text of each step is the same, as sequences of the job's length cut into shorter ones. Sequences are counted as whole ones.
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
LENGTHS = "2k:1B"


@dataclass(frozen=True)
class RampStage:
    """Steps with the same batch and the same sequence length."""

    step: int
    """its first, counted from 0"""
    before: int
    """sequences trained on before that step"""
    sequences: int
    """in each batch, of the job's length"""
    seq: int
    """tokens of the sequences that these are cut into"""


@dataclass(frozen=True)
class BatchRamp:
    """The batches of a run; without a ramp and stages of sequence length, one stage."""

    seq: int
    stages: tuple[RampStage, ...]

    @classmethod
    def of(cls, ramp: str | None, seq: int, sequences: int, lengths: str | None = None) -> Self:
        """`ramp`: train.batch_ramp; `sequences`: in the batch after it; `lengths`: train.seq_stages."""
        stages, step, before = list[RampStage](), 0, 0
        for batch, until in parse(ramp, "train.batch_ramp"):
            size = max(1, batch // seq)
            steps = -(-(until - before * seq) // (size * seq))
            if steps > 0:  # a smaller batch may have passed this stage's limit too
                stages.append(RampStage(step, before, size, seq))
                step, before = step + steps, before + steps * size
        batches = cls(seq, (*stages, RampStage(step, before, sequences, seq)))
        starts = {0: seq}  # step -> sequence length from there on
        for length, until in reversed(parse(lengths, "train.seq_stages", "length", LENGTHS)):
            start = starts.pop(0)
            starts = {0: length, batches._first_after(until): start, **starts}
        lasting = BatchRamp(seq, tuple(RampStage(step, 0, 1, starts[step]) for step in sorted(starts)))
        both = sorted({*starts, *(stage.step for stage in batches.stages)})
        return cls(
            seq,
            tuple(
                RampStage(step, batches.sequences_before(step), batches.sequences(step), lasting.at(step).seq) for step in both
            ),
        )

    def _first_after(self, tokens: int) -> int:
        """The first step before which so many tokens were trained on."""
        stage = next((one for one in reversed(self.stages) if one.before * self.seq < tokens), self.stages[0])
        return stage.step - -(tokens - stage.before * self.seq) // (stage.sequences * self.seq)

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
        """Steps of the ramp: the first step, counted from 0, with the whole batch of whole sequences."""
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
        done = [stage for stage in self._with_other("sequences") if stage.step < step]
        ends = [*(stage.before for stage in done[1:]), self.sequences_before(step)]
        return text((stage.sequences * self.seq, end * self.seq) for stage, end in zip(done, ends, strict=True))

    def _with_other(self, field: str) -> list[RampStage]:
        """The stages that begin with another batch, or another sequence length, than the steps before have."""
        pairs = zip((None, *self.stages), self.stages, strict=False)
        return [stage for before, stage in pairs if before is None or getattr(before, field) != getattr(stage, field)]

    def __str__(self) -> str:
        """`4,194,304 tokens for 61 steps, then 8,388,608`"""
        return _spans((stage.step, stage.sequences * self.seq) for stage in self._with_other("sequences"))

    @property
    def lengths(self) -> str:
        """The same of sequence lengths."""
        return _spans((stage.step, stage.seq) for stage in self._with_other("seq"))


def _spans(starts: Iterable[tuple[int, int]]) -> str:
    stages = list(starts)
    spans = [(value, later - step) for (step, value), (later, _) in pairwise(stages)]
    words = [f"{value:,} for {steps:,} step{'s' * (steps > 1)}" for value, steps in spans]
    return ", ".join([*words, f"then {stages[-1][1]:,}"])


def parse(ramp: str | None, field: str, what: str = "batch", example: str = EXAMPLE) -> list[tuple[int, int]]:
    """Tokens of a batch (or of a sequence), and tokens of the run until which steps have it; SpecError unless both grow from
    stage to stage.
    """
    stages = []
    for part in ramp.split(",") if ramp else ():
        size, colon, end = part.partition(":")
        if not colon:
            raise SpecError(
                f"{field} has the stage {shown(part.strip())} but a stage is {what.upper()}:UNTIL, tokens of a "
                f"{'sequence' if what == 'length' else what} and of the run: try {example}"
            )
        stages.append((units.tokens(size, f"{field}'s {what}"), units.total_tokens(end, f"{field}'s limit")))
    for (batch, until), (larger, later) in pairwise(stages):
        if larger <= batch or later <= until:
            works = larger if larger > batch else 2 * batch, later if later > until else 2 * until
            sizes = "batches" if what == "batch" else "lengths"
            raise SpecError(
                f"{field} has {larger}:{later} after {batch}:{until} but {sizes} and limits must grow: try "
                f"{text([(batch, until), works])}"
            )
    return stages


def stages_left(ramp: str | None, trained: int) -> str | None:
    """The ramp, or the stages of sequence length, without those that are over when so many tokens were trained on."""
    return text(stage for stage in parse(ramp, "the ramp") if stage[1] > trained) or None


def text(stages: Iterable[tuple[int, int]]) -> str:
    return ",".join(f"{batch}:{until}" for batch, until in stages)
