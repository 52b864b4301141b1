"""The targets of `ultrascale export`, by name."""

from __future__ import annotations

from dataclasses import dataclass

from ultrascale.export import accelerate, deepspeed, launchers, megatron, nanotron, torchtitan, write
from ultrascale.export.check import ExportCheck, check_export
from ultrascale.export.common import EngineFormat, File, name_of, quoted
from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.files import to_yaml
from ultrascale.specs.plan import HEADER, Plan

ENGINES: dict[str, tuple[EngineFormat, ...]] = {
    "torchtitan": (torchtitan.TOML, torchtitan.CURRENT),
    "megatron": (megatron.ENGINE,),
    "nanotron": (nanotron.ENGINE,),
    "deepspeed": (deepspeed.ENGINE,),
    "accelerate": (accelerate.ENGINE,),
}
LAUNCHERS = ("torchrun", "slurm", "kubernetes")
IMAGE = "ultrascale:latest"
STYLES = {"toml": (torchtitan.TOML,), "current": (torchtitan.CURRENT,), "both": (torchtitan.TOML, torchtitan.CURRENT)}


def check(to: str, style: str | None, image: str | None) -> None:
    names = [*ENGINES, *LAUNCHERS]
    if to not in names:
        raise SpecError(f"--to is '{to:.40}' but must be one of {', '.join(names)}: {nearest(to.lower()[:40], names)}")
    if style is not None and to != "torchtitan":
        raise SpecError(f"--style is for torchtitan, which has two; {to} has one: leave it out")
    if image is not None and to != "kubernetes":
        raise SpecError(f"--image is for kubernetes; {to} starts no container: leave it out")
    if style is not None and style not in STYLES:
        raise SpecError(
            f"--style is '{style:.40}' but must be one of {', '.join(STYLES)}: {nearest(style.lower()[:40], STYLES)}"
        )


@dataclass(frozen=True)
class EngineExport:
    """Files for an engine, what they cannot say (each line once), the command that comes next, and what they run."""

    files: list[File]
    comments: list[str]
    next_command: str
    checks: list[ExportCheck]

    @property
    def same(self) -> bool:
        return all(one.same for one in self.checks)


def engine_files(plan: Plan, to: str, style: str | None, folder: str) -> EngineExport:
    """Of an engine with two formats, and none asked for, the files that run the plan; all if none does."""
    engines = STYLES[style or "both"] if to == "torchtitan" else ENGINES[to]
    exports = [_engine_files(plan, engine, folder) for engine in engines]
    exports = [one for one in exports if one.same] or exports
    files = [file for one in exports for file in one.files]
    comments = dict.fromkeys(line for one in exports for line in one.comments)
    return EngineExport(files, list(comments), exports[-1].next_command, [check for one in exports for check in one.checks])


def _engine_files(plan: Plan, engine: EngineFormat, folder: str) -> EngineExport:
    files, comments = write.for_engine(engine, plan.job, plan.layout)
    config = next(file for file in files if file.name == engine.config)
    follows = engine.next_command(quoted(folder), plan.job)
    return EngineExport(list(files), comments, follows, [check_export(plan, engine, config)])


def launcher_files(plan: Plan, to: str, image: str | None, folder: str) -> tuple[list[File], str]:
    """The launcher beside the plan it starts, and the command that comes next."""
    run = name_of(plan.job.model.name)
    if to == "kubernetes":
        written, follows = launchers.kubernetes_files(plan, run, IMAGE if image is None else image)
    else:
        written, follows = launchers.torchrun_files(plan, run) if to == "torchrun" else launchers.slurm_files(plan, run)
    whole = File("plan.yaml", HEADER + to_yaml(plan.to_mapping()))
    return [whole, *written], follows.format(folder=quoted(folder))
