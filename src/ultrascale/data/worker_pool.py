"""Worker processes of a tokenization job: each converts one part of the input at a time to small files.

The tokens of a part, the mask of answers, if it has conversations, and its document ends are renamed to their final names only
when all are complete, the ends last: a part with an ends file is done.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from ultrascale.data import sources
from ultrascale.data.sources import PIECE, DocumentChunk, InputPart, RecordFormat
from ultrascale.data.token_files import END, smallest_type
from ultrascale.data.tokenizer import Ids, Tokenizer
from ultrascale.specs.errors import RunError, SpecError, os_reason

_MOST_PIECES = 1024  # maximum chunks in one tokenizer call
_PARENT_CHECK_S = 1.0  # interval of checks whether the parent is alive
_GRACE_S = 2.0


@dataclass(frozen=True)
class WorkerReport:
    """A worker's progress in its part, or that the part is done."""

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
    """path of the part's files, without suffix"""

    @property
    def tokens(self) -> Path:
        return self.name.with_name(self.name.name + ".tokens")

    @property
    def answers(self) -> Path:
        return self.name.with_name(self.name.name + ".answers")

    @property
    def ends(self) -> Path:
        return self.name.with_name(self.name.name + ".ends")


class WorkerPool:
    """A fixed number of worker processes; `idle` has the pipes of those without a task."""

    def __init__(self, workers: int, tokenizer: Tokenizer, form: RecordFormat) -> None:
        context = multiprocessing.get_context("fork")
        self._pipes: dict[Connection, Any] = {}
        self.idle: list[Connection] = []
        for _ in range(workers):
            parent_end, child_end = context.Pipe()
            process = context.Process(target=_worker, args=(child_end, os.getpid(), tokenizer, form), daemon=True)
            process.start()
            child_end.close()
            self._pipes[parent_end] = process
            self.idle.append(parent_end)

    def submit(self, task: WorkerTask) -> None:
        self.idle.pop().send(task)

    def receive(self) -> Iterator[WorkerReport]:
        """Waits for reports of workers; raises a worker's error."""
        for pipe in wait(list(self._pipes), timeout=_PARENT_CHECK_S):
            assert isinstance(pipe, Connection)
            try:
                report = pipe.recv()
            except (EOFError, OSError):
                process = self._pipes[pipe]
                process.join(_GRACE_S)
                raise RunError(
                    f"a worker of the tokenizer ended without a word (exit code {process.exitcode}; out of memory?): "
                    "start the same command again, it goes on from here"
                ) from None
            if isinstance(report, Exception):
                raise report
            if report.done:
                self.idle.append(pipe)
            yield report

    def end(self) -> None:
        for process in self._pipes.values():
            process.terminate()
        for pipe, process in self._pipes.items():
            process.join(_GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()


def _worker(pipe: Connection, parent: int, tokenizer: Tokenizer, form: RecordFormat) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it and ends the workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core per worker
    try:
        while True:
            while not pipe.poll(_PARENT_CHECK_S):
                _exit_without(parent)
            _tokenize_part(pipe.recv(), pipe, parent, tokenizer, form)
    except EOFError:
        return
    except (SpecError, RunError) as error:
        pipe.send(error)
    except OSError as error:
        pipe.send(RunError(f"tokens cannot be written ({os_reason(error)}): make room, then start again"))
    except Exception:
        pipe.send(RunError(f"a worker of the tokenizer failed:\n{traceback.format_exc()}"))


def _exit_without(parent: int) -> None:
    """Ends this process if its parent is gone: a killed parent cannot end its workers."""
    if os.getppid() != parent:
        os._exit(1)


def _tokenize_part(task: WorkerTask, pipe: Connection, parent: int, tokenizer: Tokenizer, form: RecordFormat) -> None:
    temporary = [path.with_name(f"{path.name}.{os.getpid()}.tmp") for path in (task.tokens, task.answers, task.ends)]
    tokens = documents = 0
    with temporary[0].open("wb") as tokens_file, temporary[1].open("wb") as answers_file, temporary[2].open("wb") as ends_file:
        for batch in _batches(sources.read(task.part, form)):
            _exit_without(parent)
            ends = array("Q")
            for piece, (ids, answers) in zip(batch, _encoded(batch, tokenizer), strict=True):
                tokens_file.write(ids.tobytes())
                answers_file.write(answers.tobytes())
                tokens += len(ids)
                if piece.last:
                    ends.append(tokens)
            ends_file.write(np.array(ends, dtype=END).tobytes())
            documents += len(ends)
            pipe.send(WorkerReport(task.number, documents, tokens, batch[-1].place))
    for path, name in zip(temporary, (task.tokens, task.answers, task.ends), strict=True):
        os.replace(path, name)
    pipe.send(WorkerReport(task.number, documents, tokens, task.part.cost, done=True))


def _encoded(batch: Sequence[DocumentChunk], tokenizer: Tokenizer) -> Iterator[tuple[Ids, Ids]]:
    """The tokens of each chunk, with the token that ends a document, and of conversations the mask of answers."""
    texts = [piece.text for piece in batch]
    if batch[0].answers:  # where a conversation ends is its template's business
        yield from tokenizer.encode_answers(texts, [piece.answers for piece in batch])
        return
    eod, without = np.array([tokenizer.eod], dtype=smallest_type(tokenizer.vocab)), np.empty(0, dtype=np.uint8)
    for piece, ids in zip(batch, tokenizer.encode(texts), strict=True):
        yield np.concatenate((ids, eod)) if piece.last else ids, without


def _batches(pieces: Iterator[DocumentChunk]) -> Iterator[list[DocumentChunk]]:
    batch: list[DocumentChunk] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= PIECE or len(batch) >= _MOST_PIECES:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
