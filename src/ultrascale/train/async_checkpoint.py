"""Async checkpoints: copies the state to host memory during the next forward and backward, writes it in the background.

Weights and moments change only in the optimizer step. So a separate thread (on a GPU, with its own stream) copies them during
the following forward and backward, and the loop waits for it before the next update: the only time that training is blocked.
Writing, checksums and the rename happen after that, over a process group used for nothing else.
"""

from __future__ import annotations

import errno
import math
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ultrascale.data.digest import data_digest
from ultrascale.model.transformer import EMBEDDING, copy_of_embedding
from ultrascale.parallel.mesh import group_timeout_s
from ultrascale.specs.checkpointing import Checkpointing
from ultrascale.specs.errors import RunError, SpecError
from ultrascale.specs.folders import free_bytes
from ultrascale.specs.job import EMA
from ultrascale.specs.training import Training
from ultrascale.specs.units import GIB
from ultrascale.train import checkpoint
from ultrascale.train.checkpoint import Checkpoint, CheckpointState
from ultrascale.train.data import in_background
from ultrascale.train.dcp_io import Pieces, TensorSlice, load, save
from ultrascale.train.engine import Engine
from ultrascale.train.optimizer import Weight

NOTE_AFTER_S = 2.0
LONGEST_SAVE_S = 1800.0  # torch's default timeout of gloo


class CheckpointManager:
    """Saves an engine's state into a run's folder."""

    def __init__(self, engine: Engine, run: Path, settings: Checkpointing) -> None:
        self.engine, self.run, self.settings = engine, run, settings
        self.moving: Callable[[], None] = lambda: None
        """callback, called every second while the loop waits for the disk"""
        if engine.mesh.rank == 0:
            checkpoint.begin(run)
        self.group = own_group(engine)  # which ranks create together: no rank saves before partial checkpoints are deleted
        # Only rank 0 writes the manifest. The digest is needed for the first checkpoint, not for the first step.
        self._data = DataDigest(engine.training, engine.job.model.vocab, run) if engine.mesh.rank == 0 else None
        self.saved: int | None = None
        """the step of the last complete checkpoint that this run wrote"""
        self.reached_loss: float | None = None
        """the loss that ends the run, of the final checkpoint"""
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._copying = False
        self._error: BaseException | None = None
        self._stream: torch.cuda.Stream | None = None
        if engine.mesh.device.type == "cuda":
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # Allocated now and not at the first checkpoint: faulting in the pages, and pinning them for a GPU, takes seconds.
        background = settings.every > 0 and settings.background
        self._buffer = _allocate(_states(engine, True, True), self._stream is not None) if background else None

    def save(self, step: int, wait: bool = False) -> float:
        """Saves the state after `step` steps. Returns the seconds for which it has blocked training so far."""
        start = time.perf_counter()
        self.finish()
        background = self.settings.background and not wait
        self._copied.clear()
        self._copying = background
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        arguments = (self._state(step), _rng_states(self.engine), background)
        self._thread = threading.Thread(target=self._copy_and_write, args=arguments, daemon=True)
        self._thread.start()
        if not background:
            self.finish()
        return time.perf_counter() - start

    def wait_for_copy(self) -> float:
        """Waits for the copy; must be called before the weights change. Returns the seconds it took."""
        if not self._copying:
            return 0.0
        self._copying = False
        start = time.perf_counter()
        self._copied.wait()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        return time.perf_counter() - start

    def finish(self) -> None:
        """Waits until a pending save is on the disk, or has failed and been reported."""
        while self._thread is not None:
            self._thread.join(1.0)
            self.moving()
            if not self._thread.is_alive():
                self._thread = None

    def save_final(self, step: int) -> None:
        """Saves the final state of a run, synchronously; raises RunError if that fails."""
        self.finish()
        if self.saved != step:
            self.save(step, wait=True)
        if self.saved != step:
            raise RunError(f"the run could not be kept at step {step}: {self._reason(self._error)}. {self._last_complete()}")

    def _copy_and_write(self, state: CheckpointState, rng_states: Pieces, copied: bool) -> None:
        try:
            pieces = (self._copy_to_host() if copied else _states(self.engine, True, self._has_moments)) | rng_states
        except RuntimeError as error:  # no memory for the copy. Other ranks wait for this one: it takes part, and fails there
            pieces = {}
            sys.stderr.write(f"\nwarning: rank {self.engine.mesh.rank} could not copy its state aside: {error}\n")
        finally:
            self._copied.set()
        self._write(pieces, state)

    def _copy_to_host(self) -> Pieces:
        """Copies the state to a host buffer, which is reused by all checkpoints."""
        states = _states(self.engine, True, self._has_moments)
        if self._buffer is None:
            self._buffer = _allocate(states, self._stream is not None)
        copied, offset = Pieces(), 0
        with torch.no_grad(), torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            for section, name, piece in _each(states):
                count = math.prod(piece.sizes)
                copy = self._buffer[offset : offset + count].view(piece.sizes)
                copy.copy_(piece.tensor(), non_blocking=self._stream is not None)
                copied.setdefault(section, {})[name] = replace(piece, tensor=partial(_itself, copy))
                offset += count
        if self._stream is not None:
            self._stream.synchronize()
        return copied

    def _write(self, pieces: Pieces, state: CheckpointState) -> None:
        folder = checkpoint.partial_folder(self.run, state.step)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save(pieces, folder, partial(self._commit, state), self.group)
            self.saved, self._error = state.step, None
        except BaseException as error:
            self._error = error
            if self.engine.mesh.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
                sys.stderr.write(
                    f"\nwarning: the checkpoint of step {state.step} failed: {self._reason(error)}. {self._last_complete()} "
                    "Training goes on\n"
                )

    def _commit(self, state: CheckpointState, sums: checkpoint.Sums) -> None:
        assert self._data is not None  # only rank 0 commits
        checkpoint.commit(self.run, state.model_copy(update={"data": self._data.result()}), sums, self.settings.keep)

    def _state(self, step: int) -> CheckpointState:
        engine, scale = self.engine, self.engine.scale
        return CheckpointState(
            step=step,
            job=engine.job,
            layout=engine.mesh.layout,
            training=engine.training,
            updates=engine.optimizer.updates,
            moments=engine.optimizer.all_moments if self._has_moments else (),
            loss_scale=scale.value if scale.used else None,
            good_steps=scale.good,
            checkpointing=self.settings,
            base=engine.base,
            reached_loss=self.reached_loss,
        )

    @property
    def _has_moments(self) -> bool:
        return self.engine.optimizer.updates > 0

    def _reason(self, error: BaseException | None) -> str:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"no space left on the disk ({free_bytes(self.run) / GIB:,.1f} GiB free in {self.run})"
        return str(error).splitlines()[0] if error and str(error) else type(error).__name__

    def _last_complete(self) -> str:
        found = checkpoint.newest(self.run)
        return f"The last complete one is {found.name}." if found else "There is no earlier one."


class DataDigest:
    """The digest of the training data, computed in a background thread during the first steps."""

    def __init__(self, training: Training, vocab: int, run: Path) -> None:
        self._read = self._total = 0
        self._found = in_background(partial(data_digest, training, vocab, run, report=self._report))

    def _report(self, read: int, total: int) -> None:
        self._read, self._total = read, total

    def result(self) -> str:
        """Waits for the digest; prints a note if that takes longer than `NOTE_AFTER_S`."""
        with suppress(TimeoutError):
            return self._found.result(NOTE_AFTER_S)
        sys.stderr.write(
            "\nnote: the checkpoint waits until all of train.data has been read once, for its digest: "
            f"{self._read / GIB:,.1f} of {self._total / GIB:,.1f} GiB so far\n"
        )
        return self._found.result()


def restore(engine: Engine, source: Checkpoint, weights_alone: bool = False, moving: Callable[[], None] | None = None) -> None:
    """Loads a checkpoint of any layout into an engine; `moving` is called after every part that was read.

    With adapters, the frozen weights come from the checkpoint that it names, or from this one if it has no adapters.
    """
    group = own_group(engine)
    if engine.frozen:
        base = source if source.job.adapter_rank is None else checkpoint.base_of(source)
        if base is not None:
            _load(_frozen(engine), base, group, moving)
            engine.base = base.folder.resolve()
            for copy, embedding in _embedding_copies(engine, engine.frozen):
                copy.set(embedding.exact())
        if base is source:
            return
    engine.optimizer.continued(0 if weights_alone else source.updates)
    optimizer, has_moments = engine.optimizer, engine.optimizer.updates > 0
    buffers = {(id(weight), "model"): torch.empty(weight.master.shape) for weight in engine.weights if weight.is_split}
    absent = (EMA,) if EMA not in source.moments else ()  # the run begins to keep a mean of the weights
    if has_moments and optimizer.spec.format != "fp32":
        moments = [(weight, name) for weight in engine.weights for name in optimizer.moments(weight) if name != EMA]
        buffers |= {(id(weight), f"optimizer.{name}"): torch.empty(weight.master.shape) for weight, name in moments}
    pieces = _states(engine, False, has_moments, buffers, absent)
    rng_states = {} if weights_alone else _saved_rng_states(engine, source)
    _load(pieces | rng_states, source, group, moving)
    for name in _rng_states(engine).get("random", {}):
        if saved := rng_states.get("random", {}).get(name):
            torch.cuda.set_rng_state(saved.tensor()) if name.endswith("cuda") else torch.set_rng_state(saved.tensor())
    for weight in engine.weights:
        for name in ("model", *optimizer.moments(weight)):
            buffer = buffers.get((id(weight), name if name == "model" else f"optimizer.{name}"))
            if buffer is not None and weight.master.numel():
                weight.set(buffer) if name == "model" else optimizer.set_moment(weight, name, buffer)
    for copy, embedding in _embedding_copies(engine, engine.weights):
        copy.set(embedding.exact())
        for name in optimizer.moments(copy) if has_moments else ():
            optimizer.set_moment(copy, name, optimizer.moment(embedding, name))
    optimizer.fill()
    if not has_moments or absent:
        optimizer.start_ema()
    if not weights_alone and source.loss_scale is not None and engine.scale.used:
        engine.scale.value, engine.scale.good = source.loss_scale, source.good_steps


def _load(pieces: Pieces, source: Checkpoint, group: dist.ProcessGroup | None, moving: Callable[[], None] | None) -> None:
    try:
        load(pieces, source.folder, source.files, group, moving)
    except SpecError as error:
        raise SpecError(f"{error}{checkpoint.others(source.folder)}") from None


def _frozen(engine: Engine) -> Pieces:
    named: dict[str, TensorSlice] = {}
    for weight in engine.frozen:
        if weight.local.numel():
            piece = TensorSlice(
                weight.shard.shape, weight.shard.offsets, tuple(weight.local.shape), partial(_itself, weight.local)
            )
            named.setdefault(_stored_name(weight, engine), piece)
    return {"model": named}


def own_group(engine: Engine) -> dist.ProcessGroup | None:
    """A gloo group used only for checkpoints, so that saving never interleaves with training's collectives."""
    if engine.mesh.world.size == 1:
        return None
    # All ranks wait for the slowest disk, however long that takes; the watchdog detects lost ranks.
    limit_s = max(LONGEST_SAVE_S, group_timeout_s(engine.training.timeout_s))
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit_s))
    assert isinstance(group, dist.ProcessGroup)
    return group


def _allocate(states: Pieces, pinned: bool) -> torch.Tensor:
    """A host buffer for a copy of these states, with its pages faulted in; pinned if a GPU writes to it."""
    buffer = torch.zeros(sum(math.prod(piece.sizes) for _, _, piece in _each(states)))
    if pinned and buffer.numel():
        # torch rounds pinned allocations up to powers of two: up to twice as much.
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)))
    return buffer


def _states(
    engine: Engine,
    own: bool,
    moments: bool,
    buffers: Mapping[tuple[int, str], torch.Tensor] | None = None,
    absent: Collection[str] = (),
) -> Pieces:
    """Weights of this rank, and moments; `own`: of those replicated on several ranks, only the ones that this rank writes.

    In fp32: split masters and moments in bf16 are converted when they are read, and loaded into `buffers`, by id of the weight
    and section. `absent`: moments that a checkpoint does not have.
    """
    optimizer, pieces = engine.optimizer, Pieces()
    for number, weight in enumerate(engine.weights):
        if not weight.master.numel() or (own and not _writes(weight, number)):
            continue
        stored = _stored_name(weight, engine)
        shape, sizes = weight.shard.shape, tuple(weight.master.shape)
        tensors: dict[str, Callable[[], torch.Tensor]] = {"model": weight.exact}
        if moments:
            names = [name for name in optimizer.moments(weight) if name not in absent]
            tensors |= {f"optimizer.{name}": partial(optimizer.moment, weight, name) for name in names}
        for section, tensor in tensors.items():
            if buffers is not None and (id(weight), section) in buffers:
                tensor = partial(_itself, buffers[id(weight), section])
            pieces.setdefault(section, {}).setdefault(stored, TensorSlice(shape, weight.shard.offsets, sizes, tensor))
    return pieces


def _writes(weight: Weight, number: int) -> bool:
    """Ranks with the same values take turns, parameter by parameter."""
    axis = weight.shard.copies
    assert axis is not None
    return weight.shard.is_primary and number % axis.size == axis.rank


def _stored_name(weight: Weight, engine: Engine) -> str:
    return EMBEDDING if weight.shard.name == copy_of_embedding(engine.job.model) else weight.shard.name


def _embedding_copies(engine: Engine, weights: Sequence[Weight]) -> Iterator[tuple[Weight, Weight]]:
    """Embedding and its copy on the same rank: a V schedule has the first and last stage on its first rank."""
    named, copy = {weight.shard.name: weight for weight in weights}, copy_of_embedding(engine.job.model)
    if copy in named and EMBEDDING in named:
        yield named[copy], named[EMBEDDING]


def _rng_states(engine: Engine) -> Pieces:
    """This rank's RNG states. The engine draws no random numbers after initialization; extensions may."""
    states = {f"rank-{engine.mesh.rank}": torch.get_rng_state()}
    if engine.mesh.device.type == "cuda":
        states[f"rank-{engine.mesh.rank}-cuda"] = torch.cuda.get_rng_state()
    return {
        "random": {name: TensorSlice.whole(tuple(one.shape), partial(_itself, one), one.dtype) for name, one in states.items()}
    }


def _saved_rng_states(engine: Engine, source: Checkpoint) -> Pieces:
    """Buffers for the checkpoint's RNG states: this rank's, and its share of unused ones, to verify their checksums."""
    found: dict[str, TensorSlice] = {}
    for name, entry in source.names.items():
        section, _, key = name.partition(".")
        if section == "random" and int(key.split("-")[1]) % engine.mesh.world.size == engine.mesh.rank:
            buffer = torch.empty(entry.size, dtype=torch.uint8)
            found[key] = TensorSlice.whole(tuple(entry.size), partial(_itself, buffer), torch.uint8)
    return {"random": found}


def _each(pieces: Pieces) -> Iterator[tuple[str, str, TensorSlice]]:
    for section, named in pieces.items():
        for name, piece in named.items():
            yield section, name, piece


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
