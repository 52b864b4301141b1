"""Worker processes of a tokenizing job: each turns one part of the input at a time into two small files.

A part's tokens and its documents' ends appear under their names only when both are whole, the ends last: what is there is done.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from ultrascale.data import sources
from ultrascale.data.binary import END, smallest_type
from ultrascale.data.input_parts import PIECE, DocumentChunk, InputPart
from ultrascale.data.tokenizer import Tokenizer
from ultrascale.specs.errors import RunError, SpecError

_MOST_PIECES = 1024  # given to the tokenizer together
_GLANCE_S = 1.0  # between looks whether the parent still lives
_GRACE_S = 2.0


@dataclass(frozen=True)
class WorkerReport:
    """What a worker tells: how far it is in its part, or that the part is done."""

    number: int
    documents: int
    tokens: int
    place: int
    done: bool = False


@dataclass(frozen=True)
class WorkerTask:
    number: int
    part: InputPart
    name: Path
    """of the part's files, without their endings"""

    @property
    def tokens(self) -> Path:
        return self.name.with_name(self.name.name + ".tokens")

    @property
    def ends(self) -> Path:
        return self.name.with_name(self.name.name + ".ends")


class WorkerPool:
    """So many workers, of whom some are idle."""

    def __init__(self, workers: int, tokenizer: Tokenizer, field: str) -> None:
        context = multiprocessing.get_context("fork")
        self._pipes: dict[Connection, Any] = {}
        self.idle: list[Connection] = []
        for _ in range(workers):
            here, there = context.Pipe()
            process = context.Process(target=_worker, args=(there, os.getpid(), tokenizer, field), daemon=True)
            process.start()
            there.close()
            self._pipes[here] = process
            self.idle.append(here)

    def give(self, task: WorkerTask) -> None:
        self.idle.pop().send(task)

    def hear(self) -> Iterator[WorkerReport]:
        """Waits until somebody says something. What a worker could not do is raised here."""
        for pipe in wait(list(self._pipes), timeout=_GLANCE_S):
            assert isinstance(pipe, Connection)
            try:
                said = pipe.recv()
            except (EOFError, OSError):
                process = self._pipes[pipe]
                process.join(_GRACE_S)
                raise RunError(
                    f"a worker of the tokenizer ended without a word (exit code {process.exitcode}; out of memory?): "
                    "start the same command again, it goes on from here"
                ) from None
            if isinstance(said, Exception):
                raise said
            if said.done:
                self.idle.append(pipe)
            yield said

    def end(self) -> None:
        for process in self._pipes.values():
            process.terminate()
        for pipe, process in self._pipes.items():
            process.join(_GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()


def _worker(pipe: Connection, parent: int, tokenizer: Tokenizer, field: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is asked, and ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a worker
    try:
        while True:
            while not pipe.poll(_GLANCE_S):
                _leave_with(parent)
            _do(pipe.recv(), pipe, parent, tokenizer, field)
    except EOFError:
        return
    except (SpecError, RunError) as error:
        pipe.send(error)
    except OSError as error:
        pipe.send(RunError(f"tokens cannot be written ({(error.strerror or str(error)).lower()}): make room, then start again"))
    except Exception:
        pipe.send(RunError(f"a worker of the tokenizer failed:\n{traceback.format_exc()}"))


def _leave_with(parent: int) -> None:
    """A killed parent tells nobody."""
    if os.getppid() != parent:
        os._exit(1)


def _do(task: WorkerTask, pipe: Connection, parent: int, tokenizer: Tokenizer, field: str) -> None:
    temporary = [path.with_name(f"{path.name}.{os.getpid()}.tmp") for path in (task.tokens, task.ends)]
    kind = smallest_type(tokenizer.vocab)
    eod = np.array([tokenizer.eod], dtype=kind)
    tokens = documents = 0
    with temporary[0].open("wb") as held, temporary[1].open("wb") as ended:
        for batch in _batches(sources.read(task.part, field)):
            _leave_with(parent)
            ends = array("Q")
            for piece, ids in zip(batch, tokenizer.encode([piece.text for piece in batch]), strict=True):
                held.write(ids.tobytes())
                tokens += len(ids)
                if piece.last:
                    held.write(eod.tobytes())
                    tokens += 1
                    ends.append(tokens)
            ended.write(np.array(ends, dtype=END).tobytes())
            documents += len(ends)
            pipe.send(WorkerReport(task.number, documents, tokens, batch[-1].place))
    os.replace(temporary[0], task.tokens)
    os.replace(temporary[1], task.ends)
    pipe.send(WorkerReport(task.number, documents, tokens, task.part.cost, done=True))


def _batches(pieces: Iterator[DocumentChunk]) -> Iterator[list[DocumentChunk]]:
    batch: list[DocumentChunk] = []
    held = 0
    for piece in pieces:
        batch.append(piece)
        held += len(piece.text)
        if held >= PIECE or len(batch) >= _MOST_PIECES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch
