"""Stages of torch's pipelines without their neighbours, which would tell them the shapes of what they send.

A stage that is built without shapes gets those of the first stage's outputs: stages between the first and the last return what
they take. If the first stage is another rank's, a process of its own runs the program as that rank until it has run the stage.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ultrascale.measure.foreign.request import CannotRehearseError, ForeignRequest
from ultrascale.measure.foreign.run import CHILD, REQUEST, RESULT
from ultrascale.parallel.torch_private import exchange_pipeline_shapes, rank_of_pipeline_stage, shapes_of_gradients

SHAPES = "shapes.pickle"
ASSUMED = "pipeline: every stage but the last is taken to send what the first stage sends, and to get gradients of these shapes"
DIFFERENT = (
    "the pipeline's stage {stage} sends {sent}, but the first stage sends {first}, and no other rank's stage is known: "
    "give each PipelineStage its input_args and output_args"
)


class StageShapes:
    """What stages of this process receive from those that do not exist."""

    def __init__(self, first_stage: Callable[[int], Any], note: Callable[[str], Any]) -> None:
        """`first_stage`: the shapes that the first stage sends, of which the global rank is given."""
        self.first_stage, self.note = first_stage, note
        self.between: Any = None

    def receive(self, stage: Any, source: int) -> Any:
        self.note(ASSUMED)
        if source > stage.stage_index:
            return shapes_of_gradients(stage)
        if self.between is None:
            self.between = self.first_stage(rank_of_pipeline_stage(stage, 0))
        return self.between

    def send(self, stage: Any, shapes: Any, destination: int) -> None:
        if destination < stage.stage_index:
            return
        if self.between is None:
            self.between = shapes
        if shapes != self.between:
            sent, first = (_in_words(one) for one in (shapes, self.between))
            raise CannotRehearseError(DIFFERENT.format(stage=stage.stage_index, sent=sent, first=first))


def _in_words(shapes: Any) -> str:
    return " and ".join(f"{list(one.shape)} in {str(one.dtype).removeprefix('torch.')}" for one in shapes.forward_metas)


def stages_without_neighbours(request: ForeignRequest, folder: Path, note: Callable[[str], Any]) -> None:
    """Replaces functions of torch's pipelines in this process; one that runs for its first stage's shapes ends with them."""
    if request.only_shapes:
        exchange_pipeline_shapes(_nothing_before_the_first, lambda stage, shapes, _: _leave(folder, shapes))
        return
    shapes = StageShapes(lambda rank: first_stage_of(request, rank), note)
    exchange_pipeline_shapes(lambda stage, source: shapes.receive(stage, source), lambda *args: shapes.send(*args))


def _nothing_before_the_first(stage: Any, _: int) -> Any:
    raise CannotRehearseError(
        f"the pipeline's first stage is not on the first of its ranks, which has stage {stage.stage_index}"
    )


def _leave(folder: Path, shapes: Any) -> None:
    (folder / SHAPES).write_bytes(pickle.dumps(shapes))
    os._exit(0)


def first_stage_of(request: ForeignRequest, rank: int) -> Any:
    """Runs the program as another rank, without a GPU, until it knows what its stage sends."""
    other = replace(request, rank=rank, device="meta", only_shapes=True)
    with tempfile.TemporaryDirectory(prefix="ultrascale-") as name:
        folder = Path(name)
        (folder / REQUEST).write_text(json.dumps(other.to_json()), encoding="utf-8")
        sys.stdout.flush()
        subprocess.run([*CHILD, name], env={**os.environ, **other.environment}, check=False)
        if (folder / SHAPES).is_file():
            return pickle.loads((folder / SHAPES).read_bytes())
        result = folder / RESULT
        refused = json.loads(result.read_text(encoding="utf-8")).get("refused") if result.is_file() else None
    raise CannotRehearseError(refused) if refused else RuntimeError(f"rank {rank}, of the first stage, sent nothing")
