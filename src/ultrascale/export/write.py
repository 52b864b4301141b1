"""Export: a plan as files, fields with a setting in the engine's own form, the others as lines of a header."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ultrascale.export import fields, header
from ultrascale.export.common import EngineFormat, File
from ultrascale.export.table import World
from ultrascale.specs.errors import SpecError, os_reason
from ultrascale.specs.files import write_text
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout


def for_engine(engine: EngineFormat, job: Job, layout: Layout) -> tuple[tuple[File, ...], list[str]]:
    """The engine's files, and the lines that stand in their header."""
    settings = engine.settings(job, layout)
    found = engine.read(settings, engine.config, World(job.cluster.gpus)).fields
    wanted = fields.plan_fields(job, layout)
    missing = fields.missing_fields(wanted, fields.with_defaults(fields.with_derived(found), engine.framework))
    if layout.batch_tokens(job.seq) == job.batch_tokens:
        missing.pop("job.batch_tokens", None)  # it follows
    comments = header.lines(missing, layout, engine.lost, engine.title, engine.program)
    return engine.files(job, layout, settings, comments), comments


def into(folder: Path, files: Sequence[File], force: bool) -> list[Path]:
    """Each file whole or not at all; a file that is in the way is named before anything is written."""
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise SpecError(f"-o is {folder}, which is a file: name a folder, such as {folder}-export")
    try:
        existing = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    except OSError as error:
        raise SpecError(f"-o is {folder}, which cannot be read ({(error.strerror or '').lower()}): name another") from None
    if existing and not force:
        raise SpecError(
            f"-o is {folder}, which is not empty: {existing[0]} is in the way; name a new folder, or write into it with --force"
        )
    try:
        os.makedirs(folder, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = os_reason(error)
        raise SpecError(f"-o is {folder}, which cannot be made ({reason}): name another folder, such as out") from None
    written = []
    for file in files:
        target = folder / file.name
        write_text(target, file.text)
        if file.text.startswith("#!"):
            target.chmod(0o755)
        written.append(target)
    return written
