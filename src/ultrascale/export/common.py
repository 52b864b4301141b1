"""What every target shares: files, engines, what was found in a foreign file, and the constants of a trial run."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ultrascale.export.fields import Fields
from ultrascale.specs.errors import SpecError
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.training import Training
from ultrascale.specs.validate import shown


@dataclass(frozen=True)
class File:
    name: str
    text: str


@dataclass(frozen=True)
class World:
    """What is known beside the file when it is read: how many GPUs, and of how many tokens."""

    gpus: int | None = None
    vocab: int | None = None

    def data_parallel(self, others: int, where: str) -> int:
        if self.gpus is None:
            raise SpecError(f"{where} does not say on how many GPUs it runs: give --cluster, such as --cluster {others}xh100")
        if self.gpus % others:
            raise SpecError(
                f"{where} cuts the model over {others} GPUs but there are {self.gpus}: try {others} or {2 * others}"
            )
        return self.gpus // others


@dataclass
class Found:
    """What a foreign file says, in our words."""

    fields: Fields = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """what was assumed, and what was not read"""


@dataclass(frozen=True)
class EngineFormat:
    """An engine, and how its own file is written and read."""

    name: str
    """as in --to"""
    title: str
    framework: str
    """the preset that says how this engine runs a layout"""
    config: str
    """the file that `import` reads"""
    native: Callable[[Job, Layout], Any]
    """the settings, as the file's parser gives them"""
    files: Callable[[Job, Layout, Any, list[str]], tuple[File, ...]]
    """of the native settings and the lines for the header"""
    parse: Callable[[str, str], Any]
    """of a text and the name of its file"""
    read: Callable[[Any, str, World], Found]
    """of native settings and the name of their file"""
    follows: Callable[[str, Job], str]
    """the command that starts it, of the quoted folder"""
    why: Mapping[str, str] = field(default_factory=dict)
    """field -> what the engine has instead"""
    world: Callable[[Any, str], tuple[int, int] | None] = lambda native, where: None
    """nodes and GPUs in each, where the settings say them"""


def steps(job: Job) -> int:
    """Optimizer steps: the whole training where its tokens are known, else a trial."""
    return math.ceil(job.total_tokens / job.batch_tokens) if job.total_tokens else Training().steps


def torchrun(job: Job) -> str:
    """torchrun's own words on one node, or on each of several."""
    nodes, each = job.cluster.nodes, job.cluster.gpus_per_node
    if nodes == 1:
        return f"torchrun --standalone --nproc-per-node {each}"
    return f'torchrun --nnodes {nodes} --nproc-per-node {each} --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:29500"'


def lowest_rate(training: Training) -> float:
    return float(f"{training.lr * training.min_lr_ratio:.6g}")


def name_of(model: str) -> str:
    """A model's name as a job or a label may carry it."""
    kept = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in model.lower())
    return "-".join(part for part in kept.split("-") if part)[:40].strip("-") or "model"


def quoted(text: str) -> str:
    """One word of a shell command, whatever is in it."""
    if any(sign in text for sign in "\n\r\x00"):
        raise SpecError(f"the path {shown(text)} has a line break in it, which no script can carry: name another")
    return shlex.quote(text)


def accumulation(total: int, dp: int, mbs: int, key: str, where: str) -> int:
    """Micro-batches of a rank that make a global batch of `total` sequences."""
    if total % (dp * mbs):
        near = max(1, total // (dp * mbs)) * dp * mbs
        raise SpecError(
            f"{where}: {key} is {total} but must be a multiple of the micro-batch {mbs} times {dp} data ranks: try {near}"
        )
    return total // (dp * mbs)
