"""The tokenizing job: what it makes, that nothing but the input decides it, and that a kill costs only what was unfinished."""

from __future__ import annotations

import functools
import itertools
import json
import operator
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from text_builders import json_lines, parquet, tokenizer, words

from ultrascale.data import tokenize as job
from ultrascale.data import worker_pool
from ultrascale.data.sets import open_set
from ultrascale.data.tokenize import TokenizeProgress, tokenize
from ultrascale.data.tokenizer import load
from ultrascale.specs.errors import RunError, SpecError

SMALL = 2**16  # bytes of a part, so that little text makes many


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    json_lines(folder / "a.jsonl", words(300, seed=1))
    json_lines(folder / "b.jsonl.gz", words(200, seed=2))
    parquet(folder / "c.parquet", words(200, seed=3), rows=50)
    (folder / "d.txt").write_text(" ".join(words(400, seed=4)), encoding="utf-8")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_dataset_has_tokens_and_documents_in_order(texts: Path, tmp_path: Path) -> None:
    path = tokenizer(tmp_path / "tokenizer.json")
    facts = tokenize(texts, tmp_path / "out", path, workers=2, part_bytes=SMALL)
    found = open_set(tmp_path / "out")
    wanted = [text for count, seed in ((300, 1), (200, 2), (200, 3)) for text in words(count, seed)]
    reader = load(path)
    ids = [[*one.tolist(), reader.eod] for one in reader.encode(wanted)]
    ends = np.cumsum([len(one) for one in ids])
    assert found.tokens[: ends[-1]].tolist() == functools.reduce(operator.iadd, ids, [])
    assert found.ends[:-1].tolist() == ends.tolist()
    assert (facts.documents, facts.tokens, facts.vocab) == (701, len(found.tokens), reader.vocab)
    assert facts.inputs.files == 4
    assert found.ends[-1] == facts.tokens
    assert sorted(content(tmp_path / "out")) == ["data.json", "tokenizer.json", "tokens.bin"]
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_the_number_of_workers_does_not_change_the_bytes(texts: Path, tmp_path: Path, with_tokenizer: bool) -> None:
    path = tokenizer(tmp_path / "tokenizer.json") if with_tokenizer else None
    sets = []
    for workers in (1, 2, 5):
        tokenize(texts, tmp_path / f"out{workers}", path, workers, part_bytes=SMALL)
        sets.append(content(tmp_path / f"out{workers}"))
    assert sets[0] == sets[1] == sets[2]


def test_a_finished_dataset_is_not_tokenized_again(texts: Path, tmp_path: Path) -> None:
    first = tokenize(texts, tmp_path / "out")
    before = (tmp_path / "out" / "tokens.bin").stat().st_mtime_ns
    assert tokenize(texts, tmp_path / "out", progress=lambda _: pytest.fail("worked again")) == first
    assert (tmp_path / "out" / "tokens.bin").stat().st_mtime_ns == before


def test_a_changed_text_of_equal_size_and_mtime_is_tokenized_again(tmp_path: Path) -> None:
    """Content decides: editors and rsync can keep both, and a clock can be set."""
    text, out = tmp_path / "a.txt", tmp_path / "out"
    text.write_bytes(b"one two three")
    before = text.stat()
    first = tokenize(text, out)
    text.write_bytes(b"one two THREE")
    os.utime(text, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (text.stat().st_size, text.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(SpecError, match=r"the texts in .*a.txt have changed since it was made: delete it, or name a new one"):
        tokenize(text, out)
    second = tokenize(text, tmp_path / "out-2")
    assert bytes(open_set(tmp_path / "out-2").tokens.astype(np.uint8)) == b"one two THREE\0"
    assert first.inputs.digest != second.inputs.digest
    text.write_bytes(b"one two three")
    assert tokenize(text, out, progress=lambda _: pytest.fail("worked again")) == first


def test_a_name_is_part_of_the_digest_and_a_time_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    (folder / "b.txt").write_text("two")
    first = tokenize(folder, tmp_path / "out")
    os.utime(folder / "a.txt", ns=(1, 1))
    assert tokenize(folder, tmp_path / "out") == first
    (folder / "a.txt").rename(folder / "c.txt")
    with pytest.raises(SpecError, match="have changed since it was made"):
        tokenize(folder, tmp_path / "out")


def test_a_dataset_without_digest_opens_and_is_tokenized_again(tmp_path: Path) -> None:
    text, out = tmp_path / "a.txt", tmp_path / "out"
    text.write_text("old text")
    tokenize(text, out)
    facts = json.loads((out / "data.json").read_text())
    assert facts["inputs"].pop("digest")
    (out / "data.json").write_text(json.dumps(facts))
    assert len(open_set(out).tokens) == 9
    text.write_text("new text")
    tokenized = tokenize(text, out)
    assert tokenized.inputs.digest is not None
    assert bytes(open_set(out).tokens.astype(np.uint8)) == b"new text\0"
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "out"]


def test_a_stopped_job_does_not_resume_with_changed_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "a.txt"
    text.write_bytes(b"word " * 40_000)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(job._TokenizeJob, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            tokenize(text, tmp_path / "out", part_bytes=SMALL)
    before = text.stat()
    text.write_bytes(b"WORD " * 40_000)
    os.utime(text, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(SpecError, match="was begun with other texts"):
        tokenize(text, tmp_path / "out", part_bytes=SMALL)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_a_fifo_among_the_texts_is_refused_without_blocking(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    os.mkfifo(folder / name)
    for source in (folder, folder / name):
        with pytest.raises(SpecError, match="not a regular file"):
            tokenize(source, tmp_path / "out")


CHILD = """
import sys
from ultrascale.data.tokenize import tokenize
tokenize(sys.argv[1], sys.argv[2], workers=int(sys.argv[3]), part_bytes=2**14)
"""


@pytest.mark.quick_cases("9")
@pytest.mark.parametrize("after", [1, 9, 25])
def test_a_killed_job_resumes_to_the_same_bytes(tmp_path: Path, after: int) -> None:
    source = json_lines(tmp_path / "a.jsonl", words(3000))
    tokenize(source, tmp_path / "whole", workers=1, part_bytes=2**14)
    child = subprocess.Popen([sys.executable, "-c", CHILD, source, tmp_path / "out", "2"])
    _wait_for(tmp_path / "out.partial" / job.NOTES, after, child)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not (tmp_path / "out").exists()
    done = json.loads((tmp_path / "out.partial" / job.NOTES).read_text())["parts"]
    reports: list[TokenizeProgress] = []
    tokenize(source, tmp_path / "out", workers=3, part_bytes=2**14, progress=reports.append)
    assert reports[0].bytes == done * 2**14
    assert reports[-1].bytes_before >= reports[0].bytes
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


def _wait_for(notes: Path, parts: int, child: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + 60
    while time.monotonic() < limit and child.poll() is None:
        if notes.exists() and json.loads(notes.read_text())["parts"] >= parts:
            return
    pytest.fail(f"the job ended before it could be killed ({child.poll()})")


@pytest.mark.parametrize("function", ["_append", "finish", "write_text"])
def test_it_resumes_after_a_failure_at_any_call(
    texts: Path, tmp_path: Path, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize(texts, tmp_path / "whole", part_bytes=SMALL)
    owner = job if function == "write_text" else job._TokenizeJob
    original, calls = getattr(owner, function), []

    def ended_after(*arguments: object, **named: object) -> object:
        found = original(*arguments, **named)
        calls.append(function)
        if len(calls) == (1 if function == "finish" else 3):
            raise RuntimeError("the power went")
        return found

    monkeypatch.setattr(owner, function, ended_after)
    with pytest.raises(RuntimeError, match="power"):
        tokenize(texts, tmp_path / "out", part_bytes=SMALL)
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    tokenize(texts, tmp_path / "out", workers=2, part_bytes=SMALL)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_finished_parts_are_not_tokenized_again(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job._TokenizeJob, "_append", lambda *_: (_ for _ in ()).throw(RuntimeError("stop")))
    with pytest.raises(RuntimeError, match="stop"):
        tokenize(texts, tmp_path / "out", workers=1, part_bytes=SMALL)
    assert len(list((tmp_path / "out.partial").glob("part-*.ends"))) == 1
    monkeypatch.undo()
    given: list[int] = []
    submit = worker_pool.WorkerPool.submit
    monkeypatch.setattr(worker_pool.WorkerPool, "submit", lambda self, task: (given.append(task.number), submit(self, task)))
    tokenize(texts, tmp_path / "out", workers=1, part_bytes=SMALL)
    assert given == list(range(1, len(given) + 1))


def test_other_options_do_not_resume_a_started_job(texts: Path, tmp_path: Path) -> None:
    _begin(texts, tmp_path / "out")
    with pytest.raises(SpecError, match="was begun with other texts, another tokenizer or other options: delete it"):
        tokenize(texts, tmp_path / "out", tokenizer(tmp_path / "tokenizer.json"), part_bytes=SMALL)


def test_a_job_resumes_after_a_file_is_repaired(texts: Path, tmp_path: Path) -> None:
    good = (texts / "d.txt").read_bytes()
    tokenize(texts, tmp_path / "whole", part_bytes=SMALL)
    (texts / "d.txt").write_bytes(good[:-1] + b"\xff")
    with pytest.raises(SpecError, match=r"d.txt is not UTF-8 at byte"):
        tokenize(texts, tmp_path / "out", part_bytes=SMALL)
    assert not (tmp_path / "out").exists()
    (texts / "d.txt").write_bytes(good)
    tokenize(texts, tmp_path / "out", part_bytes=SMALL)
    assert content(tmp_path / "out")["tokens.bin"] == content(tmp_path / "whole")["tokens.bin"]


def _begin(texts: Path, out: Path) -> None:
    """A job that has done its first part and no more."""
    with pytest.MonkeyPatch.context() as patch:
        append = job._TokenizeJob._append

        def once(self: job._TokenizeJob, task: worker_pool.WorkerTask) -> None:
            append(self, task)
            raise RuntimeError("stop")

        patch.setattr(job._TokenizeJob, "_append", once)
        with pytest.raises(RuntimeError, match="stop"):
            tokenize(texts, out, part_bytes=SMALL)


HOLD = """
import fcntl, sys
lock = open(sys.argv[1], "w")
fcntl.lockf(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_two_jobs_do_not_write_one_set(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    words = [sys.executable, "-c", HOLD, tmp_path / "out.partial" / job.LOCK]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(SpecError, match="another process is writing"):
            tokenize(texts, tmp_path / "out")


def test_a_dead_worker_fails_the_job_without_data_loss(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(worker_pool, "_tokenize_part", killed)
    with pytest.raises(RunError, match=r"a worker of the tokenizer ended without a word \(exit code -9"):
        tokenize(texts, tmp_path / "out")
    monkeypatch.undo()
    assert tokenize(texts, tmp_path / "out").documents == 701


def test_an_interrupt_is_reported_and_the_job_resumes(texts: Path, tmp_path: Path) -> None:
    def stop(progress: TokenizeProgress) -> None:
        if progress.documents:
            raise KeyboardInterrupt

    with pytest.raises(RunError, match="start the same command again to go on"):
        tokenize(texts, tmp_path / "out", part_bytes=SMALL, progress=stop)
    assert tokenize(texts, tmp_path / "out", part_bytes=SMALL).documents == 701


def test_progress_ends_at_the_total_with_rates(texts: Path, tmp_path: Path) -> None:
    reports: list[TokenizeProgress] = []
    facts = tokenize(texts, tmp_path / "out", workers=2, progress=reports.append, part_bytes=SMALL)
    last = reports[-1]
    assert (last.documents, last.tokens) == (facts.documents, facts.tokens)
    assert last.bytes == last.total_bytes == facts.inputs.bytes
    assert last.eta_s == 0
    assert all(one.bytes <= two.bytes for one, two in itertools.pairwise(reports))
