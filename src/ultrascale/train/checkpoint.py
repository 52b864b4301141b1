"""A run's checkpoints on disk: what one says of itself, which is the newest, how one appears whole or not at all.

    runs/first/checkpoints/latest                         the name of the newest complete one
    runs/first/checkpoints/step-000200/checkpoint.json    step, job, layout, training, checksums of all that follows
                                       .metadata          torch's index of the parts
                                       __0_0.distcp …     the parts that each rank wrote

A checkpoint is written under a hidden name and renamed when everything in it is on the disk. No torch until tensors are read.
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
from ultrascale.specs.folders import sync_folder
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.plan import job_from_mapping, job_to_mapping
from ultrascale.specs.training import Training
from ultrascale.specs.validate import build

if TYPE_CHECKING:
    import torch

FOLDER, MANIFEST, LATEST = "checkpoints", "checkpoint.json", "latest"
FORMAT = "ultrascale checkpoint 1"
LARGEST = 2**28  # bytes of checkpoint.json: it lists every part that every rank wrote
_NAME = re.compile(r"step-(\d{6,})")
Sums = Mapping[str, Iterable[tuple[int, int, int]]]


@dataclass(frozen=True)
class State:
    """What a run is at a step, but for its tensors."""

    step: int
    """steps done"""
    job: Job
    layout: Layout
    training: Training
    updates: int = 0
    """of the weights: fewer than steps where fp16 skipped some"""
    moments: tuple[str, ...] = ()
    """of the optimizer, beside the weights; none in a checkpoint of weights alone"""
    loss_scale: float | None = None
    good_steps: int = 0
    """since the loss scale last changed"""
    checkpointing: Checkpointing = field(default_factory=Checkpointing)
    data: int | None = None
    """fingerprint of the text that was trained on"""


@dataclass(frozen=True)
class Checkpoint:
    """A complete one on the disk."""

    folder: Path
    state: State
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
        """Whole parameters by our names; a tied head is the embedding."""
        named = {name.removeprefix("model."): entry for name, entry in self.names.items() if name.startswith("model.")}
        return {name: tuple(entry.size) for name, entry in named.items()}

    @cached_property
    def names(self) -> Mapping[str, Any]:
        """Every tensor in it, as torch's index describes it."""
        from ultrascale.train.pieces import Reader

        return Reader(self.folder, self.sums).read_metadata().state_dict_metadata

    def tensor(self, name: str) -> torch.Tensor:
        """One whole parameter in fp32."""
        import torch

        from ultrascale.train.pieces import Piece, load

        shape = self.shapes()[name]
        whole = torch.empty(shape)
        load({"model": {name: Piece.whole(shape, lambda: whole)}}, self.folder, self.sums, None)
        return whole


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in this folder; SpecError if it is not one, not whole, or not ours."""
    if not folder.is_dir():
        raise SpecError(f"checkpoint {folder} is no folder: name one such as runs/first/{FOLDER}/step-000100")
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
    numbers = build(_Numbers, {name: data[name] for name in _Numbers.model_fields if name in data}, "checkpoint")
    return Checkpoint(folder, _state(data, numbers), numbers.files)


def latest(run: Path) -> Checkpoint:
    """The newest complete checkpoint of a run; SpecError if there is none."""
    found = newest(run)
    if found is None:
        raise SpecError(f"{run} holds no complete checkpoint: name a run's folder, such as runs/first, or train it anew")
    return open_checkpoint(found)


def newest(run: Path) -> Path | None:
    try:
        named = run / FOLDER / read_text(run / FOLDER / LATEST).strip()
        if _NAME.fullmatch(named.name) and named.parent == run / FOLDER and (named / MANIFEST).exists():
            return named
    except (OSError, ValueError):
        pass
    return max(complete(run), key=step_of, default=None)


def resolve(path: Path) -> Checkpoint:
    """Of a run's folder the newest, or the checkpoint that is named itself."""
    if not path.exists():
        raise SpecError(f"--resume is {path} but nothing is there: name a run's folder, such as runs/first")
    return open_checkpoint(path) if (path / MANIFEST).exists() or _NAME.fullmatch(path.name) else latest(path)


def run_of(checkpoint: Path) -> Path:
    """The run's folder that a checkpoint lies in."""
    return (checkpoint if len(checkpoint.parts) > 2 else checkpoint.resolve()).parent.parent


def complete(run: Path) -> list[Path]:
    folder = run / FOLDER
    if not folder.is_dir():
        return []
    return sorted((one for one in folder.iterdir() if _NAME.fullmatch(one.name) and (one / MANIFEST).is_file()), key=step_of)


def step_of(folder: Path) -> int:
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else -1


def partial_folder(run: Path, step: int) -> Path:
    """Where a checkpoint is written until it is whole."""
    return run / FOLDER / f".step-{step:06d}.partial"


def begin(run: Path) -> None:
    """Takes away what a killed run left half-written."""
    for left in (run / FOLDER).glob(".*"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def commit(run: Path, state: State, sums: Sums, keep: int = 0) -> None:
    """Makes a partial checkpoint a complete one, and forgets the oldest beyond `keep` (0: none)."""
    partial, final = partial_folder(run, state.step), run / FOLDER / f"step-{state.step:06d}"
    data = _manifest(state, sums)
    write_text(partial / MANIFEST, json.dumps({**data, "checksum": _checksum(data)}) + "\n")
    sync_folder(partial)
    _set_aside(final)
    partial.rename(final)
    sync_folder(final.parent)
    write_text(final.parent / LATEST, final.name + "\n")
    sync_folder(final.parent)
    if keep:
        others = sorted((one for one in complete(run) if one != final), key=lambda one: (one / MANIFEST).stat().st_mtime)
        for old in others[: -(keep - 1) or None]:
            _set_aside(old)


def write_weights(
    run: Path,
    job: Job,
    layout: Layout,
    training: Training,
    shapes: Mapping[str, tuple[int, ...]],
    tensor: Callable[[str], torch.Tensor],
) -> Path:
    """A checkpoint of step 0 without optimizer states, one tensor in memory at a time."""
    from functools import partial

    from ultrascale.train.pieces import Piece, save

    begin(run)
    state = State(0, job, layout, training)
    pieces = {"model": {name: Piece.whole(shape, partial(tensor, name)) for name, shape in shapes.items()}}
    folder = partial_folder(run, 0)
    try:
        folder.mkdir(parents=True)
        save(pieces, folder, lambda sums: commit(run, state, sums), None)
    except OSError as error:
        raise SpecError(f"{run} cannot be written ({(error.strerror or str(error)).lower()}): name another folder") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return run / FOLDER / f"step-{0:06d}"


def _manifest(state: State, sums: Sums) -> dict[str, Any]:
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


class _Numbers(BaseModel):
    """What checkpoint.json holds beside the job, the layout and the settings of the training."""

    model_config = ConfigDict(frozen=True)

    step: int = Field(ge=0)
    updates: int = Field(ge=0)
    moments: tuple[str, ...]
    loss_scale: float | None = Field(allow_inf_nan=False)
    good_steps: int = Field(ge=0)
    data: int | None
    files: dict[str, list[tuple[int, int, int]]]


def _state(data: Mapping[str, Any], numbers: _Numbers) -> State:
    try:
        return State(
            step=numbers.step,
            job=job_from_mapping(data["job"], "checkpoint.job"),
            layout=build(Layout, data["layout"], "checkpoint.layout"),
            training=build(Training, data["training"], "checkpoint.training"),
            updates=numbers.updates,
            moments=numbers.moments,
            loss_scale=numbers.loss_scale,
            good_steps=numbers.good_steps,
            checkpointing=build(Checkpointing, data["checkpointing"], "checkpoint.checkpointing"),
            data=numbers.data,
        )
    except KeyError as missing:
        raise SpecError(f"checkpoint's {MANIFEST} has no field {missing}: it was written by another version") from None


def _checksum(data: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(data, sort_keys=True, separators=(",", ":")).encode())


def others(folder: Path) -> str:
    """Advice after bad news: the complete checkpoints beside this one."""
    beside = [one for one in complete(run_of(folder)) if one.name != folder.name]
    return f"; beside it lies {beside[-1]}: try --resume {beside[-1]}" if beside else ""


def _set_aside(folder: Path) -> None:
    """Gone in one moment, its bytes a little later."""
    if folder.exists():
        aside = folder.with_name(f".{folder.name}.old.partial")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
