"""What every target shares: the files to write, the description of an engine, and words for shells."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ultrascale.export.table import Setting, SettingsReader, UnmodelledSettings, World, written
from ultrascale.specs.errors import SpecError
from ultrascale.specs.hf_config import config_of, family_of
from ultrascale.specs.hf_families import FAMILIES
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.validate import shown

OWN_KEY = "ultrascale"  # the key of what a file without comments cannot say in its engine's settings


@dataclass(frozen=True)
class File:
    name: str
    text: str


@dataclass(frozen=True)
class EngineFormat:
    """An engine: the table of its settings, and how its own file is written and parsed."""

    name: str
    """as in --to"""
    title: str
    framework: str
    """the preset that says how this engine runs a layout"""
    config: str
    """the file that `import` reads"""
    table: tuple[Setting, ...]
    """in the order in which settings are written"""
    lost: Mapping[str, str]
    """field -> what the engine has instead, where no setting says it"""
    files: Callable[[Job, Layout, dict[str, Any], list[str]], tuple[File, ...]]
    """of the settings and the lines for the header"""
    parse: Callable[[str, str], Mapping[str, Any]]
    """the settings, of a text and the name of its file"""
    start: str
    """the command that starts it on a node: `{torchrun}` with its own words, `{machine}` for a node's, `{folder}`"""
    needs: str
    """what must be there besides, for the person who starts it"""
    environment: str = ""
    """variables before that command"""
    program: tuple[str, ...] = ()
    """fields that no setting gives, since the user's program does"""
    ignored: tuple[str, ...] = ()
    """settings that say nothing about a plan"""
    debug_model: Callable[[SettingsReader], Model | None] = field(default=lambda settings: None)
    """the engine's own small model, where the settings name that; an export has it in the place of other models"""
    assumed: tuple[str, ...] = ()
    """notes on what no file of this engine says"""
    world: Callable[[Any, str], tuple[int, int] | None] = field(default=lambda settings, where: None)
    """nodes and GPUs in each, where the settings say them"""

    def next_command(self, folder: str, job: Job) -> str:
        """The command that comes after an export, of the quoted folder."""
        return self.environment + self.start.format(torchrun=torchrun(job), machine="", folder=folder)

    def settings(self, job: Job, layout: Layout) -> dict[str, Any]:
        return written(self.table, job, layout)

    def read(self, settings: Mapping[str, Any], where: str, world: World) -> SettingsReader:
        """The fields and notes that settings give; `where` is the name of their file."""
        own = {name: one for name, one in settings.items() if name != OWN_KEY}
        found = SettingsReader(self.table, own, where, world, UnmodelledSettings.of(self.name))
        found.read()
        found.ignore(*self.ignored)
        found.notes += [*self.assumed, *found.unread()]
        return found


def hugging_face_config(model: Model) -> tuple[File, ...]:
    """model/config.json, or nothing where no family of transformers computes what the model says."""
    try:
        fields = config_of(model, "bf16")
    except SpecError:
        return ()
    return (File("model/config.json", json.dumps(fields, indent=2, ensure_ascii=True) + "\n"),)


def hugging_face_block(model: Model) -> str | None:
    """The class of one of its layers in transformers."""
    try:
        return FAMILIES[family_of(model)].layer
    except SpecError:
        return None


def torchrun(job: Job) -> str:
    """torchrun's own words on one node, or on each of several."""
    nodes, each = job.cluster.nodes, job.cluster.gpus_per_node
    if nodes == 1:
        return f"torchrun --standalone --nproc-per-node {each}"
    return f'torchrun --nnodes {nodes} --nproc-per-node {each} --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:29500"'


def name_of(model: str) -> str:
    """A model's name as a job or a label may carry it."""
    kept = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in model.lower())
    return "-".join(part for part in kept.split("-") if part)[:40].strip("-") or "model"


def quoted(text: str) -> str:
    """One word of a shell command, whatever is in it."""
    if any(sign in text for sign in "\n\r\x00"):
        raise SpecError(f"the path {shown(text)} has a line break in it, which no script can carry: name another")
    return shlex.quote(text)
