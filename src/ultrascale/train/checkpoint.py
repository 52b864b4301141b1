"""A run's checkpoints on disk: manifest, selection of the newest, and atomic commit.

    runs/first/checkpoints/latest                         the name of the newest complete one
    runs/first/checkpoints/rollback.json                  a roll-back in progress (train/history.py)
    runs/first/checkpoints/abandoned-001/step-000400      a checkpoint that a roll-back abandoned
    runs/first/checkpoints/step-000200/checkpoint.json    step, job, layout, training, checksums of all that follows
                                       .metadata          torch's index of the parts
                                       __0_0.distcp …     the parts that each rank wrote

A checkpoint is written under a hidden name and renamed when everything in it is on the disk. torch is imported only to read
tensors.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from ultrascale.specs.checkpointing import Checkpointing
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import read_text, write_text
from ultrascale.specs.folders import CHECKPOINTS, sync_folder
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.plan import job_from_mapping, job_to_mapping
from ultrascale.specs.training import Training
from ultrascale.specs.validate import build

if TYPE_CHECKING:
    import torch

MANIFEST, LATEST, ROLLBACK = "checkpoint.json", "latest", "rollback.json"
FORMAT = "ultrascale checkpoint 1"
LARGEST = 2**28  # bytes of checkpoint.json: it lists every part that every rank wrote
_NAME = re.compile(r"step-(\d{6,})")
_RECORDED = re.compile(r"(abandoned-\d{3,}/)?step-\d{6,}|metrics(\.abandoned-\d{3,})?\.jsonl")
ABANDONED = re.compile(r"abandoned-(\d{3,})")
Sums = Mapping[str, Iterable[tuple[int, int, int]]]


@dataclass(frozen=True)
class CheckpointState:
    """The state of a run at a step, without its tensors."""

    step: int
    """steps done"""
    job: Job
    layout: Layout
    training: Training
    updates: int = 0
    """optimizer updates: fewer than steps if fp16 skipped some"""
    moments: tuple[str, ...] = ()
    """names of the optimizer's moments; empty in a checkpoint that has only weights"""
    loss_scale: float | None = None
    good_steps: int = 0
    """steps since the loss scale last changed"""
    checkpointing: Checkpointing = field(default_factory=Checkpointing)
    data: str | int | None = None
    """digest of the data that was trained on (data/digest.py); a number in checkpoints of earlier versions"""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    state: CheckpointState
    sums: Sums = field(repr=False)

    @property
    def step(self) -> int:
        return self.state.step

    @property
    def job(self) -> Job:
        return self.state.job

    @property
    def layout(self) -> Layout:
        return self.state.layout

    @property
    def training(self) -> Training:
        return self.state.training

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of whole parameters by our names; a tied head is stored as the embedding."""
        named = {name.removeprefix("model."): entry for name, entry in self.names.items() if name.startswith("model.")}
        return {name: tuple(entry.size) for name, entry in named.items()}

    @cached_property
    def names(self) -> Mapping[str, Any]:
        """The metadata of every tensor in torch's index."""
        from ultrascale.train.dcp_io import ShardReader

        return ShardReader(self.folder, self.sums).read_metadata().state_dict_metadata

    def tensor(self, name: str) -> torch.Tensor:
        """One whole parameter in fp32."""
        import torch

        from ultrascale.train.dcp_io import TensorSlice, load

        shape = self.shapes()[name]
        whole = torch.empty(shape)
        load({"model": {name: TensorSlice.whole(shape, lambda: whole)}}, self.folder, self.sums, None)
        return whole


@dataclass(frozen=True)
class Rollback:
    """A return to an earlier checkpoint, or to an abandoned one. Names are relative to the folder of checkpoints."""

    source: str
    """the checkpoint to resume from, where it was before: `step-000002`, or `abandoned-001/step-000006`"""
    moves: tuple[tuple[str, str], ...]
    """renames in order: the later checkpoints out of the current branch, then those of the source's branch into it"""
    history: str
    """the metrics file with the steps up to the source, in the run's folder"""
    abandoned_metrics: str | None
    """the name under which the current metrics file is saved, in the run's folder"""

    @property
    def target(self) -> str:
        """The name of the source after the roll-back."""
        return Path(self.source).name

    @property
    def abandoned(self) -> tuple[str, ...]:
        return tuple(to for _, to in self.moves if ABANDONED.match(to))


def pending_rollback(run: Path) -> Rollback | None:
    """The roll-back that was recorded but not finished; SpecError if its record is damaged."""
    path = run / CHECKPOINTS / ROLLBACK
    try:
        data = json.loads(read_text(path))
        moves = tuple((_inside(old), _inside(new)) for old, new in data["moves"])
        abandoned = data["abandoned_metrics"]
        return Rollback(
            _inside(data["source"]), moves, _inside(data["history"]), None if abandoned is None else _inside(abandoned)
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecError(
            f"{path} records a roll-back but cannot be read ({type(error).__name__}): delete it, and name the checkpoint to "
            f"resume from, such as --resume {run / CHECKPOINTS / 'step-000100'}"
        ) from None


def _inside(name: Any) -> str:
    """Validates a name in a roll-back's record; ValueError for a path outside the run's folder."""
    if not _RECORDED.fullmatch(str(name)):
        raise ValueError(name)
    return str(name)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Opens the checkpoint in this folder; SpecError if it is not one, incomplete, or of another program."""
    if not folder.is_dir():
        raise SpecError(f"checkpoint {folder} is no folder: name one such as runs/first/{CHECKPOINTS}/step-000100")
    path = folder / MANIFEST
    try:
        text = read_text(path, LARGEST)
    except OSError as error:
        foreign = (folder / ".metadata").exists()
        what = "is of another program" if foreign else "is not a checkpoint"
        raise SpecError(f"{folder} {what}: it has no readable {MANIFEST} ({error.strerror})") from None
    except UnicodeDecodeError:
        raise SpecError(f"checkpoint {folder} is damaged: {MANIFEST} is not text{others(folder)}") from None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise SpecError(f"checkpoint {folder} is damaged: {MANIFEST} is not JSON{others(folder)}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        given = data.get("format") if isinstance(data, dict) else None
        raise SpecError(f"{path} says format {given!r:.60} but this version reads '{FORMAT}'")
    if data.pop("checksum", None) != _checksum(data):
        raise SpecError(f"checkpoint {folder} is damaged: {MANIFEST} is not what was written{others(folder)}")
    manifest = build(
        _CheckpointManifest, {name: data[name] for name in _CheckpointManifest.model_fields if name in data}, "checkpoint"
    )
    return Checkpoint(folder, _state(data, manifest), manifest.files)


def latest(run: Path) -> Checkpoint:
    """The newest complete checkpoint of a run; SpecError if there is none."""
    found = newest(run)
    if found is None:
        raise SpecError(f"{run} holds no complete checkpoint: name a run's folder, such as runs/first, or train it anew")
    return open_checkpoint(found)


def newest(run: Path) -> Path | None:
    """The checkpoint that a run resumes from: never one of an abandoned branch, unless a roll-back to it has begun."""
    if (pending := pending_rollback(run)) is not None:
        source = run / CHECKPOINTS / pending.source
        return source if (source / MANIFEST).exists() else run / CHECKPOINTS / pending.target
    try:
        named = run / CHECKPOINTS / read_text(run / CHECKPOINTS / LATEST).strip()
        if _NAME.fullmatch(named.name) and named.parent == run / CHECKPOINTS and (named / MANIFEST).exists():
            return named
    except (OSError, ValueError):
        pass
    return max(complete(run), key=step_of, default=None)


def resolve(path: Path) -> Checkpoint:
    """Opens the newest checkpoint of a run's folder, or the checkpoint at `path`."""
    if not path.exists():
        raise SpecError(f"--resume is {path} but nothing is there: name a run's folder, such as runs/first")
    return open_checkpoint(path) if (path / MANIFEST).exists() or _NAME.fullmatch(path.name) else latest(path)


def run_of(checkpoint: Path) -> Path:
    """The folder of the run that a checkpoint belongs to."""
    whole = checkpoint if len(checkpoint.parts) > 3 else checkpoint.resolve()
    return whole.parents[2] if ABANDONED.fullmatch(whole.parent.name) else whole.parents[1]


def run_named(path: Path) -> Path:
    """The run's folder for a `--resume` path: the path itself, or the run of that checkpoint, which may no longer exist."""
    return run_of(path) if _NAME.fullmatch(path.name) else path


def complete(run: Path) -> list[Path]:
    """The complete checkpoints of the current branch, by step."""
    return complete_in(run / CHECKPOINTS)


def complete_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted((one for one in folder.iterdir() if _NAME.fullmatch(one.name) and (one / MANIFEST).is_file()), key=step_of)


def abandoned_in(run: Path) -> list[Path]:
    """The folders of abandoned branches, oldest first."""
    found = [one for one in (run / CHECKPOINTS).glob("abandoned-*") if ABANDONED.fullmatch(one.name) and one.is_dir()]
    return sorted(found, key=lambda one: int(one.name.partition("-")[2]))


def step_of(folder: Path) -> int:
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else -1


def partial_folder(run: Path, step: int) -> Path:
    """The folder in which a checkpoint is written until it is complete."""
    return run / CHECKPOINTS / f".step-{step:06d}.partial"


def begin(run: Path) -> None:
    """Deletes partial checkpoints of a killed run."""
    for left in (run / CHECKPOINTS).glob(".*"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def commit(run: Path, state: CheckpointState, sums: Sums, keep: int = 0) -> None:
    """Completes a partial checkpoint, and deletes the lowest steps of the branch beyond `keep` (0: none)."""
    partial, final = partial_folder(run, state.step), run / CHECKPOINTS / f"step-{state.step:06d}"
    data = _manifest(state, sums)
    write_text(partial / MANIFEST, json.dumps({**data, "checksum": _checksum(data)}) + "\n")
    sync_folder(partial)
    # Before the rename: a kill in between leaves a name without a checkpoint, and newest() takes the highest step. After it,
    # a kill would leave a checkpoint beyond `latest`, which is what an abandoned one looks like.
    write_text(final.parent / LATEST, final.name + "\n")
    _delete(final)
    partial.rename(final)
    sync_folder(final.parent)
    if keep:
        others = [one for one in complete(run) if one != final]
        for old in others[: -(keep - 1) or None]:
            _delete(old)


def write_weights(
    run: Path,
    job: Job,
    layout: Layout,
    training: Training,
    shapes: Mapping[str, tuple[int, ...]],
    tensor: Callable[[str], torch.Tensor],
) -> Path:
    """Writes a checkpoint of step 0 without optimizer states, one tensor in memory at a time."""
    from functools import partial

    from ultrascale.train.dcp_io import TensorSlice, save

    begin(run)
    state = CheckpointState(0, job, layout, training)
    pieces = {"model": {name: TensorSlice.whole(shape, partial(tensor, name)) for name, shape in shapes.items()}}
    folder = partial_folder(run, 0)
    try:
        folder.mkdir(parents=True)
        save(pieces, folder, lambda sums: commit(run, state, sums), None)
    except OSError as error:
        raise SpecError(f"{run} cannot be written ({(error.strerror or str(error)).lower()}): name another folder") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return run / CHECKPOINTS / f"step-{0:06d}"


def _manifest(state: CheckpointState, sums: Sums) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": state.step,
        "updates": state.updates,
        "moments": list(state.moments),
        "loss_scale": state.loss_scale,
        "good_steps": state.good_steps,
        "job": job_to_mapping(state.job),
        "layout": state.layout.model_dump(mode="json"),
        "training": state.training.model_dump(mode="json"),
        "checkpointing": state.checkpointing.model_dump(mode="json"),
        "data": state.data,
        "files": {name: [list(part) for part in parts] for name, parts in sums.items()},
    }


class _CheckpointManifest(BaseModel):
    """The fields of checkpoint.json other than job, layout and training settings."""

    model_config = ConfigDict(frozen=True)

    step: int = Field(ge=0)
    updates: int = Field(ge=0)
    moments: tuple[str, ...]
    loss_scale: float | None = Field(allow_inf_nan=False)
    good_steps: int = Field(ge=0)
    data: str | int | None
    files: dict[str, list[tuple[int, int, int]]]


def _state(data: Mapping[str, Any], manifest: _CheckpointManifest) -> CheckpointState:
    try:
        return CheckpointState(
            step=manifest.step,
            job=job_from_mapping(data["job"], "checkpoint.job"),
            layout=build(Layout, data["layout"], "checkpoint.layout"),
            training=build(Training, data["training"], "checkpoint.training"),
            updates=manifest.updates,
            moments=manifest.moments,
            loss_scale=manifest.loss_scale,
            good_steps=manifest.good_steps,
            checkpointing=build(Checkpointing, data["checkpointing"], "checkpoint.checkpointing"),
            data=manifest.data,
        )
    except KeyError as missing:
        raise SpecError(f"checkpoint's {MANIFEST} has no field {missing}: it was written by another version") from None


def _checksum(data: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(data, sort_keys=True, separators=(",", ":")).encode())


def others(folder: Path) -> str:
    """Advice for an error message: another complete checkpoint of the run, the newest, or else an abandoned one."""
    run = run_of(folder)
    found = [one for one in complete(run) if one.name != folder.name]
    found = found or [one for branch in abandoned_in(run) for one in complete_in(branch) if one != folder]
    return f"; beside it lies {found[-1]}: try --resume {found[-1]}" if found else ""


def _delete(folder: Path) -> None:
    """Renames the folder before deleting it, so that an incomplete folder never has a checkpoint's name."""
    if folder.exists():
        hidden = folder.with_name(f".{folder.name}.old.partial")
        shutil.rmtree(hidden, ignore_errors=True)
        folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
