"""`tokenize`: converts texts to a token set in several processes, with bounded memory, resumable after a kill.

All work is done in OUT.partial: workers write the tokens of each part there, this process appends them in order and records its
progress. The finished set is renamed to OUT. Its contents depend only on the input and the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ultrascale.data import chat, sources
from ultrascale.data.sets import ANSWERS, FACTS, TOKENS, TokenizedInputs, TokenSetMetadata, open_set
from ultrascale.data.sources import InputPart, RecordFormat, TextField
from ultrascale.data.token_files import END, HEADER_BYTES, Header, mapped, size_of, smallest_type
from ultrascale.data.tokenizer import Tokenizer, load
from ultrascale.data.worker_pool import WorkerPool, WorkerReport, WorkerTask
from ultrascale.specs.errors import RunError, SpecError, os_reason
from ultrascale.specs.files import read_mapping, write_text
from ultrascale.specs.folders import locked
from ultrascale.specs.hub import text_folder, tokenizer_file


@dataclass(frozen=True)
class TokenizeProgress:
    """The progress of a job; rates are those of the current launch."""

    documents: int
    tokens: int
    bytes: int
    total_bytes: int
    bytes_before: int
    """read by earlier launches that did not finish"""
    tokens_before: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return (self.bytes - self.bytes_before) / max(self.seconds, 1e-9)

    @property
    def tokens_per_s(self) -> float:
        return (self.tokens - self.tokens_before) / max(self.seconds, 1e-9)

    @property
    def eta_s(self) -> float | None:
        rate = self.bytes_per_s
        return (self.total_bytes - self.bytes) / rate if rate > 0 else None


Report = Callable[[TokenizeProgress], None]


class ProgressMeter:
    """Sums the reports of workers into a progress report."""

    def __init__(self, parts: Sequence[InputPart], done: int, tokens: int, documents: int, report: Report | None) -> None:
        self.documents, self.tokens, self.report = documents, tokens, report
        self.total = sum(part.cost for part in parts)
        self.bytes = self.bytes_before = sum(part.cost for part in parts[:done])
        self.tokens_before = tokens
        self.started = time.monotonic()
        self.unfinished: dict[int, WorkerReport] = {}
        self._send()

    def update(self, worker_report: WorkerReport) -> None:
        self.unfinished[worker_report.number] = worker_report
        self._send()

    def part_appended(self, task: WorkerTask, documents: int, tokens: int) -> None:
        """Called when a part has been appended, with the new totals."""
        self.bytes += task.part.cost
        if self.unfinished.pop(task.number, None) is None:  # tokenized by an earlier launch
            self.bytes_before += task.part.cost
            self.tokens_before += tokens - self.tokens
        self.documents, self.tokens = documents, tokens
        self._send()

    def _send(self) -> None:
        if self.report is None:
            return
        unfinished = self.unfinished.values()
        self.report(
            TokenizeProgress(
                documents=self.documents + sum(worker_report.documents for worker_report in unfinished),
                tokens=self.tokens + sum(worker_report.tokens for worker_report in unfinished),
                bytes=self.bytes + sum(worker_report.place for worker_report in unfinished),
                total_bytes=self.total,
                bytes_before=self.bytes_before,
                tokens_before=self.tokens_before,
                seconds=time.monotonic() - self.started,
            )
        )


MOST_WORKERS = 1024
NOTES, ENDS, LOCK, TOKENIZER = "progress.json", "ends", "lock", "tokenizer.json"
_AHEAD = 4  # parts per worker that may wait for an earlier one: bounds what is on disk twice


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
    """Writes a token set to folder `out` from a file, a folder of files, `stdlib`, or `hf://datasets/ORG/NAME`. A repeated
    call resumes.
    """
    file = None if tokenizer is None else tokenizer_file(tokenizer)
    return _tokenize(source, out, load(file, eod), file, TextField(field), workers, progress, part_bytes)


def tokenize_chats(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str] | None = None,
    workers: int = 1,
    template: str | os.PathLike[str] | None = None,
    eod: str | None = None,
    progress: Report | None = None,
    part_bytes: int = sources.PART,
) -> TokenSetMetadata:
    """As `tokenize`, of conversations, with a mask of the answers. `template`: a file, if not the tokenizer's own template."""
    file = None if tokenizer is None else tokenizer_file(tokenizer, chat.CONFIG, chat.TEMPLATE)
    file = file / TOKENIZER if file is not None and file.is_dir() else file
    encoder = load(file, eod, chat=True)
    rendered = chat.ChatTemplate.load(None if file is None else file.parent, None if template is None else Path(template))
    return _tokenize(source, out, encoder, file, chat.Conversations(rendered), workers, progress, part_bytes)


def _tokenize(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    encoder: Tokenizer,
    file: Path | None,
    form: RecordFormat,
    workers: int,
    progress: Report | None,
    part_bytes: int,
) -> TokenSetMetadata:
    if not 1 <= workers <= MOST_WORKERS:
        raise SpecError(f"--workers is {workers} but must be from 1 to {MOST_WORKERS}: try {os.cpu_count() or 1}")
    source = text_folder(source, form.suffixes)
    files = sources.find(os.fspath(source), form.suffixes)
    contents = sources.digests(files, workers)
    inputs = TokenizedInputs(
        path=os.fspath(source),
        files=len(files),
        bytes=sum(map(size_of, files)),
        field=form.name,
        digest=_digest(os.fspath(source), files, contents),
    )
    template = form.template.sha256 if isinstance(form, chat.Conversations) else None
    folder = Path(os.path.abspath(out))  # `.` has no name to append a suffix to
    work = folder.with_name(folder.name + ".partial")
    if (done := _finished(Path(out), encoder, template, inputs)) is not None:
        shutil.rmtree(work, ignore_errors=True)
        return done
    parts = sources.cut(files, contents, form, part_bytes)
    with _locked(work):
        job = _TokenizeJob(work, encoder, parts, part_bytes, form, template)
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
        facts = job.finish(encoder, inputs, file)
        if (folder / FACTS).exists():  # written before digests were stored: see `_finished`
            os.replace(folder, work / "before")
        os.replace(work / "set", folder)
        shutil.rmtree(work, ignore_errors=True)
    return facts


def _finished(out: Path, encoder: Tokenizer, template: str | None, inputs: TokenizedInputs) -> TokenSetMetadata | None:
    """The set in the folder if it is already this one; None if it must be written; SpecError for anything else there."""
    try:
        existing = sorted(os.listdir(out)) if out.is_dir() else []
    except OSError as error:
        raise SpecError(f"-o is {out} but it cannot be read ({(error.strerror or '').lower()}): name another folder") from None
    if os.path.lexists(out) and not out.is_dir():
        raise SpecError(f"-o is {out}, a file: name a folder, such as {out}-tokens")
    if not existing:
        return None
    if FACTS not in existing:
        raise SpecError(f"-o is {out} but that folder holds other files ({existing[0]}): name a new one, such as {out}-tokens")
    facts = open_set(out).facts
    assert facts is not None
    made = facts.tokenizer_sha256, facts.vocab, facts.eod, facts.template_sha256
    if made == (encoder.sha256, encoder.vocab, encoder.eod, template):
        if facts.inputs == inputs:
            return facts
        if facts.inputs == inputs.model_copy(update={"digest": None}):  # the content of its inputs is unknown
            return None
        if facts.inputs.path == inputs.path and facts.inputs.field == inputs.field:
            raise SpecError(
                f"-o is {out} but the texts in {inputs.path} have changed since it was made: delete it, or name a new one, "
                f"such as {out}-2"
            )
    raise SpecError(f"-o is {out} but that folder holds a set made of {facts.inputs.path}: name a new one, such as {out}-2")


def _digest(source: str, files: list[Path], contents: list[str]) -> str:
    """A digest of the file names relative to the source and of the content of each file, in order."""
    root = Path(source)
    named = [os.path.relpath(file, root) if root.is_dir() else file.name for file in files]
    return hashlib.blake2b(json.dumps([named, contents]).encode(), digest_size=32).hexdigest()


@contextmanager
def _locked(work: Path) -> Iterator[None]:
    """Creates and locks the folder of the job."""
    try:
        (work / "set").mkdir(parents=True, exist_ok=True)
        (work / LOCK).touch()
    except OSError as error:
        reason = os_reason(error)
        raise SpecError(f"-o: no folder can be made at {work} ({reason}): name another, such as data/tokens") from None
    with locked(work / LOCK, f"-o: another process is writing {work}: wait for it, or name another folder"):
        try:
            yield
        except OSError as error:
            reason = os_reason(error)
            raise RunError(f"{work} cannot be written ({reason}): make room, then start the same command again") from None


class _TokenizeJob:
    """A tokenization job: the parts of the input, how many have been appended, and their totals."""

    def __init__(
        self, work: Path, encoder: Tokenizer, parts: list[InputPart], part_bytes: int, form: RecordFormat, template: str | None
    ) -> None:
        self.work, self.encoder, self.parts, self.form, self.template = work, encoder, parts, form, template
        self.type = smallest_type(encoder.vocab)
        self.file, self.ends = work / "set" / TOKENS, work / ENDS
        self.answers = None if template is None else work / "set" / ANSWERS
        self.parts_done = self.tokens = self.documents = 0
        options = json.dumps([1, encoder.sha256, encoder.vocab, encoder.eod, form.name, part_bytes, template])
        self.digests = [hashlib.sha256(options.encode()).hexdigest()]
        """after each part: of the options and all parts so far"""
        for part in parts:
            self.digests.append(hashlib.sha256((self.digests[-1] + json.dumps(asdict(part))).encode()).hexdigest())
        self._continue()

    def _continue(self) -> None:
        """Resumes from the recorded progress of an earlier launch, and drops what it wrote beyond that."""
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
            if self.answers is not None:
                self.answers.write_bytes(b"")
        _truncate(self.file, HEADER_BYTES + self.tokens * self.type.itemsize)
        if self.answers is not None:
            _truncate(self.answers, self.tokens)
        _truncate(self.ends, self.documents * END.itemsize)
        wanted = {path for task in self._tasks() for path in (task.tokens, task.answers, task.ends)}
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
        pool = WorkerPool(min(workers, len(waiting)), self.encoder, self.form)
        finished: dict[int, WorkerTask] = {}  # by a worker, not yet appended
        running: dict[int, WorkerTask] = {}
        try:
            while waiting or running or finished:
                while waiting and pool.idle and waiting[-1].number < self.parts_done + _AHEAD * workers:
                    task = waiting.pop()
                    if task.ends.exists():  # tokenized by an earlier launch that ended before it was appended
                        finished[task.number] = task
                        continue
                    running[task.number] = task
                    pool.submit(task)
                for report_ in pool.receive() if running else ():
                    meter.update(report_)
                    if report_.done:
                        finished[report_.number] = running.pop(report_.number)
                while self.parts_done in finished:
                    task = finished.pop(self.parts_done)
                    self._append(task)
                    meter.part_appended(task, self.documents, self.tokens)
        finally:
            pool.end()

    def _append(self, task: WorkerTask) -> None:
        ends = np.fromfile(task.ends, dtype=END)
        count = _append_file(task.tokens, self.file) // self.type.itemsize
        if self.answers is not None:
            _append_file(task.answers, self.answers)
        with self.ends.open("ab") as file:
            file.write((ends + END.type(self.tokens)).astype(END).tobytes())
            _sync(file.fileno(), file.flush)
        self.parts_done, self.tokens, self.documents = self.parts_done + 1, self.tokens + count, self.documents + len(ends)
        notes = {"parts": self.parts_done, "digest": self.digests[self.parts_done]}
        write_text(self.work / NOTES, json.dumps(notes | {"tokens": self.tokens, "documents": self.documents}))
        for path in (task.tokens, task.answers, task.ends):
            path.unlink()

    def finish(self, encoder: Tokenizer, inputs: TokenizedInputs, tokenizer: Path | None) -> TokenSetMetadata:
        """Completes the set: header, document ends and data.json."""
        if not self.documents:
            shutil.rmtree(self.work, ignore_errors=True)
            raise SpecError(f"{inputs.path} holds no text: name files that are not empty")
        header = Header(self.type, self.tokens, self.documents, encoder.vocab)
        with self.file.open("r+b") as file, self.ends.open("rb") as ends:
            file.write(header.pack())
            file.seek(0, os.SEEK_END)
            file.write(bytes(header.padding))
            shutil.copyfileobj(ends, file, 2**20)
            _sync(file.fileno(), file.flush)
        if tokenizer is not None:
            shutil.copyfile(tokenizer, self.file.with_name(TOKENIZER))
        facts = TokenSetMetadata(
            tokenizer=encoder.name,
            tokenizer_sha256=encoder.sha256,
            vocab=encoder.vocab,
            eod=encoder.eod,
            tokens=self.tokens,
            documents=self.documents,
            dtype="uint16" if self.type.itemsize == 2 else "uint32",
            answers=self._count_answers(),
            template_sha256=self.template,
            inputs=inputs,
        )
        write_text(self.file.with_name(FACTS), json.dumps(facts.model_dump(), indent=1, ensure_ascii=False) + "\n")
        return facts

    def _count_answers(self) -> int | None:
        if self.answers is None:
            return None
        return int(np.count_nonzero(mapped(self.answers, np.dtype(np.uint8), 0, self.tokens)))


def _append_file(source: Path, target: Path) -> int:
    """Appends a file to another; returns how many bytes."""
    with target.open("ab") as file, source.open("rb") as part:
        shutil.copyfileobj(part, file, 2**20)
        _sync(file.fileno(), file.flush)
        return part.tell()


def _truncate(path: Path, size: int) -> None:
    if path.stat().st_size < size:
        raise SpecError(f"{path} has lost bytes that an earlier start wrote: delete {path.parent}, or name another -o")
    os.truncate(path, size)


def _sync(file: int, flush: Callable[[], None]) -> None:
    """Syncs a file to the disk, before the recorded progress includes it."""
    flush()
    os.fsync(file)
