"""`tokenize`: texts become a token set, in several processes, with a memory that does not grow, and again after a kill.

Everything happens in OUT.partial: workers leave the tokens of each part there, this process appends them in the parts' order
and notes how far it is. The finished set is renamed to OUT, whole. What it holds depends on the input and the tokenizer alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ultrascale.data import sources
from ultrascale.data.binary import END, HEADER_BYTES, Header, smallest_type
from ultrascale.data.input_parts import InputPart
from ultrascale.data.progress import ProgressMeter, Report
from ultrascale.data.reading import size_of
from ultrascale.data.sets import FACTS, TOKENS, TokenizedInputs, TokenSetMetadata, open_set
from ultrascale.data.tokenizer import Tokenizer, load
from ultrascale.data.worker_pool import WorkerPool, WorkerTask
from ultrascale.specs.errors import RunError, SpecError
from ultrascale.specs.files import read_mapping, write_text
from ultrascale.specs.folders import alone

MOST_WORKERS = 1024
NOTES, ENDS, LOCK = "progress.json", "ends", "lock"
_AHEAD = 4  # parts per worker that may wait for an earlier one: bounds what lies on disk twice


def tokenize(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str] | None = None,
    workers: int = 1,
    field: str = "text",
    eod: str | None = None,
    progress: Report | None = None,
    part_bytes: int = sources.PART,
) -> TokenSetMetadata:
    """The set in folder `out`, made of a file, a folder of files, or `stdlib`. Started again, it goes on where it was."""
    if not 1 <= workers <= MOST_WORKERS:
        raise SpecError(f"--workers is {workers} but must be from 1 to {MOST_WORKERS}: try {os.cpu_count() or 1}")
    words = load(Path(tokenizer) if tokenizer is not None else None, eod)
    files = sources.find(os.fspath(source))
    contents = sources.digests(files, workers)
    inputs = TokenizedInputs(
        path=os.fspath(source),
        files=len(files),
        bytes=sum(map(size_of, files)),
        field=field,
        digest=_digest(os.fspath(source), files, contents),
    )
    folder = Path(os.path.abspath(out))  # `.` has no name to put beside
    work = folder.with_name(folder.name + ".partial")
    if (done := _finished(Path(out), words, inputs)) is not None:
        shutil.rmtree(work, ignore_errors=True)
        return done
    parts = sources.cut(files, contents, field, part_bytes)
    with _alone(work):
        job = _Job(work, words, parts, part_bytes, field)
        try:
            job.run(workers, progress)
        except (SpecError, KeyboardInterrupt) as error:
            if isinstance(error, KeyboardInterrupt):
                raise RunError(
                    f"stopped after {job.documents:,} documents: start the same command again to go on ({work})"
                ) from None
            if not job.parts_done:
                shutil.rmtree(work, ignore_errors=True)
            raise
        facts = job.finish(words, inputs, Path(tokenizer) if tokenizer is not None else None)
        if (folder / FACTS).exists():  # made before digests were kept: `_finished` says so
            os.replace(folder, work / "before")
        os.replace(work / "set", folder)
        shutil.rmtree(work, ignore_errors=True)
    return facts


def _finished(out: Path, words: Tokenizer, inputs: TokenizedInputs) -> TokenSetMetadata | None:
    """What is in the folder already, if it is this; None if it has to be made; SpecError if it is anything else."""
    try:
        there = sorted(os.listdir(out)) if out.is_dir() else []
    except OSError as error:
        raise SpecError(f"-o is {out} but it cannot be read ({(error.strerror or '').lower()}): name another folder") from None
    if os.path.lexists(out) and not out.is_dir():
        raise SpecError(f"-o is {out}, a file: name a folder, such as {out}-tokens")
    if not there:
        return None
    if FACTS not in there:
        raise SpecError(f"-o is {out} but that folder holds other files ({there[0]}): name a new one, such as {out}-tokens")
    facts = open_set(out).facts
    assert facts is not None
    if (facts.tokenizer_sha256, facts.vocab, facts.eod) == (words.sha256, words.vocab, words.eod):
        if facts.inputs == inputs:
            return facts
        if facts.inputs == inputs.model_copy(update={"digest": None}):  # nothing says of what content it was made
            return None
        if facts.inputs.path == inputs.path and facts.inputs.field == inputs.field:
            raise SpecError(
                f"-o is {out} but the texts in {inputs.path} have changed since it was made: delete it, or name a new one, "
                f"such as {out}-2"
            )
    raise SpecError(f"-o is {out} but that folder holds a set made of {facts.inputs.path}: name a new one, such as {out}-2")


def _digest(source: str, files: list[Path], contents: list[str]) -> str:
    """Of the names below the source and the content of each file, in order."""
    root = Path(source)
    named = [os.path.relpath(file, root) if root.is_dir() else file.name for file in files]
    return hashlib.blake2b(json.dumps([named, contents]).encode(), digest_size=32).hexdigest()


@contextmanager
def _alone(work: Path) -> Iterator[None]:
    """The folder of the job, for this process alone."""
    try:
        (work / "set").mkdir(parents=True, exist_ok=True)
        (work / LOCK).touch()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise SpecError(f"-o: no folder can be made at {work} ({reason}): name another, such as data/tokens") from None
    with alone(work / LOCK, f"-o: another process is writing {work}: wait for it, or name another folder"):
        try:
            yield
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise RunError(f"{work} cannot be written ({reason}): make room, then start the same command again") from None


class _Job:
    """The parts of the input, how many of them have been appended, and what they hold."""

    def __init__(self, work: Path, words: Tokenizer, parts: list[InputPart], part_bytes: int, field: str) -> None:
        self.work, self.words, self.parts, self.field = work, words, parts, field
        self.type = smallest_type(words.vocab)
        self.file, self.ends = work / "set" / TOKENS, work / ENDS
        self.parts_done = self.tokens = self.documents = 0
        options = json.dumps([1, words.sha256, words.vocab, words.eod, field, part_bytes])
        self.digests = [hashlib.sha256(options.encode()).hexdigest()]
        """after each part: of the options and all parts so far"""
        for part in parts:
            self.digests.append(hashlib.sha256((self.digests[-1] + json.dumps(asdict(part))).encode()).hexdigest())
        self._continue()

    def _continue(self) -> None:
        """Takes up what an earlier start noted, and drops what it had begun beyond that."""
        if (self.work / NOTES).exists():
            notes = read_mapping(self.work / NOTES, "progress")
            done = notes.get("parts")
            fits = isinstance(done, int) and 0 <= done <= len(self.parts) and self.digests[done] == notes.get("digest")
            if not fits:
                raise SpecError(
                    f"{self.work} was begun with other texts, another tokenizer or other options: delete it, or name another -o"
                )
            self.parts_done, self.tokens, self.documents = int(notes["parts"]), int(notes["tokens"]), int(notes["documents"])
        if not self.file.exists():
            self.file.write_bytes(bytes(HEADER_BYTES))
            self.ends.write_bytes(b"")
        _shorten(self.file, HEADER_BYTES + self.tokens * self.type.itemsize)
        _shorten(self.ends, self.documents * END.itemsize)
        wanted = {path for task in self._tasks() for path in (task.tokens, task.ends)}
        for path in self.work.glob("part-*"):
            if path not in wanted:
                path.unlink()

    def _tasks(self) -> Iterator[WorkerTask]:
        for number in range(self.parts_done, len(self.parts)):
            yield WorkerTask(number, self.parts[number], self.work / f"part-{number:07d}-{self.digests[number + 1][:16]}")

    def run(self, workers: int, report: Report | None) -> None:
        waiting = list(self._tasks())[::-1]
        if not waiting:
            return
        meter = ProgressMeter(self.parts, self.parts_done, self.tokens, self.documents, report)
        crew = WorkerPool(min(workers, len(waiting)), self.words, self.field)
        made: dict[int, WorkerTask] = {}  # by a worker, not yet appended
        given: dict[int, WorkerTask] = {}
        try:
            while waiting or given or made:
                while waiting and crew.idle and waiting[-1].number < self.parts_done + _AHEAD * workers:
                    task = waiting.pop()
                    if task.ends.exists():  # an earlier start made it, but was ended before it came in turn
                        made[task.number] = task
                        continue
                    given[task.number] = task
                    crew.give(task)
                for said in crew.hear() if given else ():
                    meter.saw(said)
                    if said.done:
                        made[said.number] = given.pop(said.number)
                while self.parts_done in made:
                    task = made.pop(self.parts_done)
                    self._append(task)
                    meter.kept(task, self.documents, self.tokens)
        finally:
            crew.end()

    def _append(self, task: WorkerTask) -> None:
        ends = np.fromfile(task.ends, dtype=END)
        with self.file.open("ab") as file, task.tokens.open("rb") as part:
            shutil.copyfileobj(part, file, 2**20)
            count = part.tell() // self.type.itemsize
            _settle(file.fileno(), file.flush)
        with self.ends.open("ab") as file:
            file.write((ends + END.type(self.tokens)).astype(END).tobytes())
            _settle(file.fileno(), file.flush)
        self.parts_done, self.tokens, self.documents = self.parts_done + 1, self.tokens + count, self.documents + len(ends)
        notes = {"parts": self.parts_done, "digest": self.digests[self.parts_done]}
        write_text(self.work / NOTES, json.dumps(notes | {"tokens": self.tokens, "documents": self.documents}))
        task.tokens.unlink()
        task.ends.unlink()

    def finish(self, words: Tokenizer, inputs: TokenizedInputs, tokenizer: Path | None) -> TokenSetMetadata:
        """Header, ends and data.json: the set as it will be found."""
        if not self.documents:
            shutil.rmtree(self.work, ignore_errors=True)
            raise SpecError(f"{inputs.path} holds no text: name files that are not empty")
        header = Header(self.type, self.tokens, self.documents, words.vocab)
        with self.file.open("r+b") as file, self.ends.open("rb") as ends:
            file.write(header.pack())
            file.seek(0, os.SEEK_END)
            file.write(bytes(header.padding))
            shutil.copyfileobj(ends, file, 2**20)
            _settle(file.fileno(), file.flush)
        if tokenizer is not None:
            shutil.copyfile(tokenizer, self.file.with_name("tokenizer.json"))
        facts = TokenSetMetadata(
            tokenizer=words.name,
            tokenizer_sha256=words.sha256,
            vocab=words.vocab,
            eod=words.eod,
            tokens=self.tokens,
            documents=self.documents,
            dtype="uint16" if self.type.itemsize == 2 else "uint32",
            inputs=inputs,
        )
        write_text(self.file.with_name(FACTS), json.dumps(facts.model_dump(), indent=1, ensure_ascii=False) + "\n")
        return facts


def _shorten(path: Path, size: int) -> None:
    if path.stat().st_size < size:
        raise SpecError(f"{path} has lost bytes that an earlier start wrote: delete {path.parent}, or name another -o")
    os.truncate(path, size)


def _settle(file: int, flush: Callable[[], None]) -> None:
    """On the disk, before anything says that it is there."""
    flush()
    os.fsync(file)
