"""Import: a plan from an engine's file, its header lines and what the user adds; assumptions become notes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ultrascale.cost.estimate import estimate
from ultrascale.cost.legality import check
from ultrascale.export import accelerate, deepspeed, fields, header, megatron, nanotron, torchtitan
from ultrascale.export.common import OWN_KEY, EngineFormat
from ultrascale.export.fields import Fields
from ultrascale.export.table import MAY_CHANGE, NOT_READ, SettingsReader, World
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import FileTooLargeError, mapping_of, read_text, reason_of
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.plan import Plan
from ultrascale.specs.validate import build

MAX_FILE_BYTES = 2**20  # configurations are some KiB
ASSUMED_GPU = "h100"
_KINDS = (
    "a run.sh of Megatron-LM, a config.toml or .py of torchtitan, a config.yaml of nanotron or Accelerate, or a ds_config.json"
)


@dataclass(frozen=True)
class ImportOptions:
    """What the user gives beside the file."""

    cluster: Cluster | None = None
    model: Model | None = None
    seq: int | None = None
    framework: Framework | None = None

    def fields(self) -> Fields:
        found: Fields = {}
        if self.model is not None:
            found["model"] = fields.model_to_mapping(self.model)
        if self.seq is not None:
            found["job.seq"] = self.seq
        return found


@dataclass(frozen=True)
class ImportedPlan:
    plan: Plan
    engine: EngineFormat
    notes: tuple[str, ...] = field(default=())

    @property
    def native(self) -> Plan | None:
        """The same run as its own engine would run it, where the plan is for another."""
        job = self.plan.job
        if job.framework.engine == Framework.load(self.engine.framework).engine:
            return None
        there = job.changed(framework=Framework.load(self.engine.framework))
        return Plan(job=there, layout=self.plan.layout, estimate=estimate(there, self.plan.layout))


def plan_from(path: Path, given: ImportOptions | None = None) -> ImportedPlan:
    """Of a Python file with several configurations, `path` names one: `config_registry.py:llama3_8b`."""
    name = path.name
    file, colon, _ = name.rpartition(":")
    if colon and file.endswith(".py") and not path.exists():
        path = path.with_name(file)
    text = text_of(path)
    return plan_from_text(engine_of(path, text), text, name, given or ImportOptions())


def plan_from_text(engine: EngineFormat, text: str, where: str, given: ImportOptions) -> ImportedPlan:
    """What the engine does with the settings of a file; `where` is its name."""
    settings = engine.parse(text, where)
    extra = header.parse(_header_text(settings, text), engine.program)
    notes: list[str] = []
    cluster = _cluster(engine, settings, where, extra, given, notes)
    world = World(None if cluster is None else cluster.gpus, given.model.vocab if given.model else None)
    found = engine.read(settings, where, world)
    with _naming_misspellings(found, where):
        if cluster is None:
            cluster = _as_many_as_needed(found, extra, where, notes)
        job, layout = _build(found, extra, given, cluster, engine)
        check(job, layout)
    notes += found.notes if not extra else [note for note in found.notes if note.startswith((NOT_READ, MAY_CHANGE))]
    reasons = (f"read from {where}, a file for {engine.title}", *notes)
    return ImportedPlan(Plan(job=job, layout=layout, estimate=estimate(job, layout), reasons=reasons), engine, tuple(notes))


@contextmanager
def _naming_misspellings(found: SettingsReader, where: str) -> Iterator[None]:
    """A misspelt setting leaves another without its value: the sentence about that one names it too."""
    try:
        yield
    except SpecError as error:
        misspelt = [note.removeprefix(NOT_READ) for note in found.notes if note.startswith(NOT_READ)]
        if not misspelt:
            raise
        raise SpecError(f"{error}; {where} has {misspelt[0]}") from None


def _build(
    found: SettingsReader, extra: Fields, given: ImportOptions, cluster: Cluster, engine: EngineFormat
) -> tuple[Job, Layout]:
    where = found.where
    known = fields.with_defaults(found.fields, engine.framework)
    known = fields.merged(fields.merged(known, extra), given.fields())
    if "job.seq" not in known:
        raise SpecError(f"{where} does not say how long a sequence is: give --seq, such as --seq 4096")
    debug_model = None if fields.has_model(known) else engine.debug_model(found)
    if debug_model is not None:
        known |= fields.model_fields(debug_model)
    if not fields.has_model(known):
        raise SpecError(f"{where} does not say which model it trains: give --model, such as --model llama-3-8b")
    if given.seq is not None:
        known.pop("job.batch_tokens", None)
    known["job.framework"] = given.framework or framework_of(known)
    known["job.cluster"] = cluster
    return fields.job_and_layout(fields.with_derived(known))


def framework_of(known: Fields) -> Framework:
    """The engine's preset, with what its settings switch on and off."""
    preset = Framework.load(known["job.framework"])
    prefix = "framework."
    changes = {name.removeprefix(prefix): value for name, value in known.items() if name.startswith(prefix)}
    return build(Framework, {**preset.model_dump(), **changes}, "framework")


def _cluster(
    engine: EngineFormat, settings: Any, where: str, extra: Fields, given: ImportOptions, notes: list[str]
) -> Cluster | None:
    if given.cluster is not None:
        return given.cluster
    launched = engine.world(settings, where)
    if "job.cluster" in extra:
        kept = fields.cluster_of(extra["job.cluster"])
        if launched is None or launched == (kept.nodes, kept.gpus_per_node):
            return kept
    return None if launched is None else _assumed(*launched, notes)


def _as_many_as_needed(found: SettingsReader, extra: Fields, where: str, notes: list[str]) -> Cluster:
    axes = {f"layout.{axis}": 1 for axis in ("dp", "tp", "pp", "cp")} | found.fields | extra
    gpus = axes["layout.dp"] * axes["layout.tp"] * axes["layout.pp"] * axes["layout.cp"]
    if gpus <= 8 or gpus % 8 == 0:
        return _assumed(max(1, gpus // 8), min(gpus, 8), notes)
    raise SpecError(
        f"{where} runs on {gpus} GPUs, which are no whole nodes of 8: give --cluster, such as --cluster '{gpus}x1 h100'"
    )


def _assumed(nodes: int, each: int, notes: list[str]) -> Cluster:
    words = f"{nodes}x{each} {ASSUMED_GPU}"
    notes.append(f"the file names no GPU: {words} is assumed (--cluster {nodes * each}xh200 for others)")
    return Cluster.load(words)


def text_of(path: Path) -> str:
    """The file's text, within bounds."""
    if os.path.isdir(path):
        raise SpecError(f"{path} is a folder: name a file in it: {_KINDS}")
    try:
        text = read_text(path, MAX_FILE_BYTES)
    except FileTooLargeError:
        raise SpecError(f"{path} has more than {MAX_FILE_BYTES:,} bytes, too many for a configuration: name {_KINDS}") from None
    except OSError as error:
        raise SpecError(f"{path} {reason_of(error)}: name {_KINDS}") from None
    except UnicodeDecodeError:
        raise SpecError(f"{path} is not text: name {_KINDS}") from None
    if not text.strip():
        raise SpecError(f"{path} is empty: name {_KINDS}")
    return text


def engine_of(path: Path, text: str) -> EngineFormat:
    """By the file's ending and, where two engines share one, by its settings."""
    ending = path.suffix.lower()
    named = {".toml": torchtitan.TOML, ".py": torchtitan.CURRENT, ".json": deepspeed.ENGINE}
    if ending in named:
        return named[ending]
    if ending in (".sh", ".bash", ".slurm", ".sbatch") or text.startswith("#!"):
        if "ultrascale train" in text or "-m ultrascale" in text:
            raise SpecError(f"{path} starts ultrascale itself: read the plan.yaml beside it with `ultrascale explain`")
        return megatron.ENGINE
    if ending not in (".yaml", ".yml"):
        raise SpecError(f"{path} ends in '{ending}', which cannot be told: name {_KINDS}")
    data = mapping_of(text, path.name, "YAML")
    if {"job", "layout", "estimate"} <= set(data):
        raise SpecError(f"{path} is a plan already: read it with `ultrascale explain {path}`")
    if megatron.ARGUMENTS in data:
        return megatron.ENGINE
    if {"parallelism", "tokens"} & set(data):
        return nanotron.ENGINE
    if {"compute_environment", "distributed_type", "fsdp_config", "num_processes"} & set(data):
        return accelerate.ENGINE
    known = ", ".join(sorted(map(str, data))[:5])
    raise SpecError(f"{path} is YAML of no engine that is known (it has {known:.80}): name {_KINDS}")


def _header_text(settings: Mapping[str, Any], text: str) -> str:
    if OWN_KEY not in settings:
        return text
    lines = settings[OWN_KEY]
    return "\n".join(line for line in lines if isinstance(line, str)) if isinstance(lines, list) else ""
