"""The targets of `ultrascale export`, by name."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ultrascale.export import accelerate, deepspeed, launchers, megatron, nanotron, torchtitan, write
from ultrascale.export.check import ExportCheck, check_export
from ultrascale.export.common import EngineFormat, File, quoted
from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.plan import Plan

ENGINES: dict[str, tuple[EngineFormat, ...]] = {
    "torchtitan": (torchtitan.TOML, torchtitan.CURRENT),
    "megatron": (megatron.ENGINE,),
    "nanotron": (nanotron.ENGINE,),
    "deepspeed": (deepspeed.ENGINE,),
    "accelerate": (accelerate.ENGINE,),
}
LAUNCHERS = tuple(launchers.table())
STYLES = {"toml": (torchtitan.TOML,), "current": (torchtitan.CURRENT,), "both": (torchtitan.TOML, torchtitan.CURRENT)}


def check(to: str, style: str | None, launcher: str | None, image: str | None) -> None:
    _one_of("--to", to, [*ENGINES, *LAUNCHERS])
    if launcher is not None:
        if to in LAUNCHERS:
            raise SpecError(f"--launcher is for another engine's files; --to {to} starts ours: leave it out")
        _one_of("--launcher", launcher, list(LAUNCHERS))
    if style is not None and to != "torchtitan":
        raise SpecError(f"--style is for torchtitan, which has two; {to} has one: leave it out")
    starts = to if to in LAUNCHERS else launcher
    if image is not None and (starts is None or not launchers.table()[starts].get("container")):
        known = ", ".join(name for name, spec in launchers.table().items() if spec.get("container"))
        raise SpecError(f"--image is for launchers of containers ({known}); {starts or to} starts none: leave it out")
    if style is not None:
        _one_of("--style", style, list(STYLES))


def _one_of(option: str, given: str, names: list[str]) -> None:
    if given not in names:
        raise SpecError(
            f"{option} is '{given:.40}' but must be one of {', '.join(names)}: {nearest(given.lower()[:40], names)}"
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


def with_launcher(exported: EngineExport, plan: Plan, launcher: str, image: str | None, folder: str) -> EngineExport:
    """The same with the files of a launcher; of an engine with two formats, the last one that was written is started."""
    engine = next(
        check.engine for check in reversed(exported.checks) if check.engine.config in {f.name for f in exported.files}
    )
    program = launchers.engine_program(plan, engine, exported.files)
    files, follows = launchers.launcher_files(plan, program, launcher, image)
    return replace(exported, files=files, next_command=follows.replace("{folder}", quoted(folder)))


def launcher_files(plan: Plan, to: str, image: str | None, folder: str) -> tuple[list[File], str]:
    """The launcher beside the plan it starts, and the command that comes next."""
    files, follows = launchers.launcher_files(plan, launchers.own_program(plan), to, image)
    return files, follows.replace("{folder}", quoted(folder))
