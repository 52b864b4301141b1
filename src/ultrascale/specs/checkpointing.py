"""Checkpointing: how often a run is kept, how many of its checkpoints stay, and whether training waits for the disk."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ultrascale.specs.validate import FrozenSpec, build
from ultrascale.specs.words import field_from_text

WHAT = "checkpoint"  # the fields' first word, in overrides and sentences


class Checkpointing(FrozenSpec):
    """A run is kept at its end and when it is interrupted; more often if asked."""

    save: bool = Field(True, strict=True, description="false: nothing is kept")
    every: int = Field(
        0, ge=0, le=2**40, strict=True, examples=[200], description="steps between checkpoints; 0: only at the end"
    )
    keep: int = Field(3, ge=0, le=2**20, strict=True, description="how many stay, the newest; 0: all of them")
    background: bool = Field(
        True, strict=True, description="write beside the training, from a copy in host memory; false: training waits"
    )

    def changed(self, **fields: Any) -> Checkpointing:
        return build(Checkpointing, {**self.model_dump(), **fields}, WHAT)

    def due(self, step: int) -> bool:
        """Whether a run that has done `step` steps is kept now."""
        return self.save and self.every > 0 and step % self.every == 0


def checkpoint_value(field: str, text: str) -> Any:
    """The value of `field` written as text on a command line (`every=200`), or SpecError."""
    return field_from_text(Checkpointing, WHAT, field, text)
