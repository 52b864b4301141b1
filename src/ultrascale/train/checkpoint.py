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
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ultrascale.specs.checkpointing import Checkpointing
from ultrascale.specs.errors import SpecError, os_reason
from ultrascale.specs.files import read_text, write_text
from ultrascale.specs.folders import CHECKPOINTS, MANIFEST, STEP_FOLDER, step_folder, sync_folder
from ultrascale.specs.job import EMA, Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.plan import job_from_mapping, job_to_mapping
from ultrascale.specs.training import Training
from ultrascale.specs.validate import build

if TYPE_CHECKING:
    import torch

LATEST, ROLLBACK = "latest", "rollback.json"
FORMAT = "ultrascale checkpoint 1"
MAX_MANIFEST_BYTES = 2**28  # checkpoint.json lists every part that every rank wrote
ABANDONED = re.compile(r"abandoned-(\d{3,})")
Sums = dict[str, list[tuple[int, int, int]]]
"""per file: offset, bytes and CRC-32 of each part in it"""


class CheckpointState(BaseModel):
    """The state of a run at a step, without its tensors: the fields of checkpoint.json."""

    model_config = ConfigDict(frozen=True)

    step: int = Field(ge=0)
    """steps done"""
    updates: int = Field(0, ge=0)
    """optimizer updates: fewer than steps if fp16 skipped some"""
    moments: tuple[str, ...] = ()
    """names of the optimizer's moments; empty in a checkpoint that has only weights"""
    loss_scale: float | None = Field(None, allow_inf_nan=False)
    good_steps: int = Field(0, ge=0)
    """steps since the loss scale last changed"""
    job: Job
    layout: Layout
    training: Training
    checkpointing: Checkpointing = Checkpointing()
    base: Path | None = None
    """the checkpoint that has the frozen weights, where this one holds adapters alone; None: they are as initialized"""
    reached_loss: float | None = None
    """the loss that was low enough for train.stop_at_loss"""
    data: str | int | None = None
    """digest of the data that was trained on (data/digest.py); a number in checkpoints of earlier versions"""

    def reaches_goal(self, training: Training) -> bool:
        """Whether train.stop_at_loss of a run that resumes has been reached."""
        goal = training.stop_at_loss
        return goal is not None and self.reached_loss is not None and self.reached_loss <= goal


class Checkpoint(CheckpointState):
    """A complete checkpoint on disk."""

    folder: Path
    files: Sums = Field(repr=False)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of whole parameters by our names; a tied head is stored as the embedding."""
        named = {name.removeprefix("model."): entry for name, entry in self.names.items() if name.startswith("model.")}
        return {name: tuple(entry.size) for name, entry in named.items()}

    @cached_property
    def names(self) -> Mapping[str, Any]:
        """The metadata of every tensor in torch's index."""
        from ultrascale.train.dcp_io import ShardReader

        return ShardReader(self.folder, self.files).read_metadata().state_dict_metadata

    def tensor(self, name: str, section: str = "model") -> torch.Tensor:
        """One whole parameter, or one of its moments, in fp32."""
        import torch

        from ultrascale.train.dcp_io import TensorSlice, load

        shape = self.shapes()[name]
        whole = torch.empty(shape)
        load({section: {name: TensorSlice.whole(shape, lambda: whole)}}, self.folder, self.files, None)
        return whole


RunFileName = Annotated[str, Field(pattern=r"^((abandoned-\d{3,}/)?step-\d{6,}|metrics(\.abandoned-\d{3,})?\.jsonl)$")]
"""a name in a roll-back's record: never a path outside the run's folder"""


class Rollback(BaseModel):
    """A return to an earlier checkpoint, or to an abandoned one. Names are relative to the folder of checkpoints."""

    model_config = ConfigDict(frozen=True)

    source: RunFileName
    """the checkpoint to resume from, where it was before: `step-000002`, or `abandoned-001/step-000006`"""
    moves: tuple[tuple[RunFileName, RunFileName], ...]
    """renames in order: the later checkpoints out of the current branch, then those of the source's branch into it"""
    history: RunFileName
    """the metrics file with the steps up to the source, in the run's folder"""
    abandoned_metrics: RunFileName | None
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
        return Rollback.model_validate_json(read_text(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise SpecError(
            f"{path} records a roll-back but cannot be read ({type(error).__name__}): delete it, and name the checkpoint to "
            f"resume from, such as --resume {run / CHECKPOINTS / 'step-000100'}"
        ) from None


def open_checkpoint(folder: Path) -> Checkpoint:
    """Opens the checkpoint in this folder; SpecError if it is not one, incomplete, or of another program."""
    if not folder.is_dir():
        raise SpecError(f"checkpoint {folder} is no folder: name one such as runs/first/{CHECKPOINTS}/step-000100")
    path = folder / MANIFEST
    try:
        text = read_text(path, MAX_MANIFEST_BYTES)
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
    for name in ("base", "reached_loss"):  # checkpoints of earlier versions
        data.setdefault(name, None)
    wanted = [*CheckpointState.model_fields, "files"]
    if missing := [name for name in wanted if name not in data]:
        raise SpecError(f"checkpoint's {MANIFEST} has no field '{missing[0]}': it was written by another version")
    fields = {**{name: data[name] for name in wanted}, "job": job_from_mapping(data["job"], "checkpoint.job")}
    return build(Checkpoint, {**fields, "folder": folder}, "checkpoint")


def base_of(adapters: Checkpoint) -> Checkpoint | None:
    """The checkpoint with the weights beside which these adapters were trained; None: those were initialized by a seed."""
    if adapters.base is None:
        return None
    if not adapters.base.is_dir():
        raise SpecError(
            f"{adapters.folder} holds adapters alone, of the weights in {adapters.base}, where nothing is: put them back there"
        )
    return open_checkpoint(adapters.base)


def trained(source: Checkpoint, ema: bool) -> Callable[[str], torch.Tensor]:
    """Each whole weight that the checkpoint holds in fp32, or its moving mean."""
    if ema and EMA not in source.moments:
        raise SpecError(f"{source.folder} holds no moving mean of its weights: leave --ema out, or train with job.ema=true")
    return partial(source.tensor, section=f"optimizer.{EMA}") if ema else source.tensor


def merged(source: Checkpoint, ema: bool = False) -> tuple[Checkpoint, Callable[[str], torch.Tensor]]:
    """The checkpoint that holds all weights, and each whole weight in fp32 with what adapters add to it.

    `ema`: the moving mean of what was trained.
    """
    own, rank = trained(source, ema), source.job.adapter_rank
    if rank is None:
        return source, own
    from ultrascale.model.adapters import adapted

    base, pairs = base_of(source), adapted(source.shapes())
    if base is None:
        raise SpecError(f"{source.folder} holds adapters beside random weights, of no use elsewhere: train with --weights")

    def tensor(name: str) -> torch.Tensor:
        weight = base.tensor(name)
        if name in pairs:
            down, up = map(own, pairs[name])
            weight.addmm_(up, down, alpha=source.training.adapter_alpha / rank)
        return weight

    return base, tensor


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
        if STEP_FOLDER.fullmatch(named.name) and named.parent == run / CHECKPOINTS and (named / MANIFEST).exists():
            return named
    except (OSError, ValueError):
        pass
    return max(complete(run), key=step_of, default=None)


def resolve(path: Path) -> Checkpoint:
    """Opens the newest checkpoint of a run's folder, or the checkpoint at `path`."""
    if not path.exists():
        raise SpecError(f"--resume is {path} but nothing is there: name a run's folder, such as runs/first")
    return open_checkpoint(path) if (path / MANIFEST).exists() or STEP_FOLDER.fullmatch(path.name) else latest(path)


def run_of(checkpoint: Path) -> Path:
    """The folder of the run that a checkpoint belongs to."""
    whole = checkpoint if len(checkpoint.parts) > 3 else checkpoint.resolve()
    return whole.parents[2] if ABANDONED.fullmatch(whole.parent.name) else whole.parents[1]


def run_named(path: Path) -> Path:
    """The run's folder for a `--resume` path: the path itself, or the run of that checkpoint, which may no longer exist."""
    return run_of(path) if STEP_FOLDER.fullmatch(path.name) else path


def complete(run: Path) -> list[Path]:
    """The complete checkpoints of the current branch, by step."""
    return complete_in(run / CHECKPOINTS)


def complete_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    found = [one for one in folder.iterdir() if STEP_FOLDER.fullmatch(one.name) and (one / MANIFEST).is_file()]
    return sorted(found, key=step_of)


def abandoned_in(run: Path) -> list[Path]:
    """The folders of abandoned branches, oldest first."""
    found = [one for one in (run / CHECKPOINTS).glob("abandoned-*") if ABANDONED.fullmatch(one.name) and one.is_dir()]
    return sorted(found, key=lambda one: int(one.name.partition("-")[2]))


def step_of(folder: Path) -> int:
    match = STEP_FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else -1


def partial_folder(run: Path, step: int) -> Path:
    """The folder in which a checkpoint is written until it is complete."""
    return run / CHECKPOINTS / f".{step_folder(step)}.partial"


def begin(run: Path) -> None:
    """Deletes partial checkpoints of a killed run."""
    for left in (run / CHECKPOINTS).glob(".*"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def commit(run: Path, state: CheckpointState, sums: Sums, keep: int = 0) -> None:
    """Completes a partial checkpoint, and deletes the lowest steps of the branch beyond `keep` (0: none)."""
    partial, final = partial_folder(run, state.step), run / CHECKPOINTS / step_folder(state.step)
    data = {"format": FORMAT, **state.model_dump(mode="json"), "job": job_to_mapping(state.job), "files": sums}
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
    from ultrascale.train.dcp_io import TensorSlice, save

    begin(run)
    state = CheckpointState(step=0, job=job, layout=layout, training=training)
    pieces = {"model": {name: TensorSlice.whole(shape, partial(tensor, name)) for name, shape in shapes.items()}}
    folder = partial_folder(run, 0)
    try:
        folder.mkdir(parents=True)
        save(pieces, folder, lambda sums: commit(run, state, sums), None)
    except OSError as error:
        raise SpecError(f"{run} cannot be written ({os_reason(error)}): name another folder") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return run / CHECKPOINTS / step_folder(0)


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
