"""The digest of training data: it changes with every token, weight and document end that counts, and with nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import write_conversations, write_tokens
from ultrascale.data import digest
from ultrascale.data.digest import data_digest
from ultrascale.specs.training import Training

VOCAB, TOKENS = 1000, 10_000
TEXT = np.random.default_rng(0).integers(0, VOCAB, TOKENS)
ENDS = np.array([10, 5_000, TOKENS])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_tokens(tmp_path / "a.bin", TEXT, ENDS, VOCAB)
    return tmp_path / "a.bin"


def of(data: object, mask: bool = False, **fields: object) -> str:
    return data_digest(Training(data=str(data), document_mask=mask, **fields), VOCAB)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", [0, 1234, TOKENS - 1])
def test_every_token_changes_the_digest(file: Path, tmp_path: Path, place: int) -> None:
    text = TEXT.copy()
    text[place] = (text[place] + 1) % VOCAB
    write_tokens(tmp_path / "b.bin", text, ENDS, VOCAB)
    assert of(tmp_path / "b.bin") != of(file)


def test_document_ends_change_the_digest_only_under_a_document_mask(file: Path, tmp_path: Path) -> None:
    write_tokens(tmp_path / "b.bin", TEXT, np.array([11, 5_000, TOKENS]), VOCAB)
    assert of(tmp_path / "b.bin") == of(file)
    assert of(tmp_path / "b.bin", mask=True) != of(file, mask=True)


def test_answers_and_ends_of_conversations_change_the_digest(tmp_path: Path) -> None:
    documents = np.split(TEXT[:100], [30, 60])
    masks = [np.arange(len(one)) > 5 for one in documents]
    first = write_conversations(tmp_path / "a", documents, masks, VOCAB)
    same = write_conversations(tmp_path / "b", documents, masks, VOCAB)
    other = write_conversations(tmp_path / "c", documents, [masks[0], masks[1], np.arange(40) > 6], VOCAB)
    cut = write_conversations(tmp_path / "d", np.split(TEXT[:100], [30, 61]), np.split(np.concatenate(masks), [30, 61]), VOCAB)
    assert of(first) == of(same)
    assert len({of(one) for one in (first, other, cut)}) == 3


def test_paths_seeds_and_weight_scale_do_not_change_the_digest(file: Path, tmp_path: Path) -> None:
    write_tokens(tmp_path / "b.bin", TEXT, ENDS, VOCAB)
    assert of(tmp_path / "b.bin", seed=3) == of(file)
    assert of(f"{file}:0.7,stdlib:0.3") == of(f"{tmp_path / 'b.bin'}:7,stdlib:3")
    assert of("synthetic", seed=3) == of("synthetic")
    assert len({of(file), of(f"{file}:0.7,stdlib:0.3"), of(f"{file}:0.6,stdlib:0.4"), of("stdlib"), of("synthetic")}) == 5


def test_the_tokenizer_changes_the_digest(tmp_path: Path) -> None:
    found = []
    for sha in ("a" * 64, "b" * 64):
        folder = tmp_path / sha[:1]
        folder.mkdir()
        write_tokens(folder / "tokens.bin", TEXT, ENDS, VOCAB)
        inputs = {"path": "texts", "files": 1, "bytes": 1, "field": "text"}
        facts = {"tokenizer": "tokenizer.json", "tokenizer_sha256": sha, "vocab": VOCAB, "eod": 0, "tokens": TOKENS}
        facts |= {"documents": len(ENDS), "dtype": "uint16", "inputs": inputs}
        (folder / "data.json").write_text(json.dumps(facts))
        found.append(of(folder))
    assert found[0] != found[1]


def test_multithreaded_hashing_is_equal_and_reports_every_byte(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "PIECE_BYTES", 1000)
    training, reports = Training(data=str(file)), list[tuple[int, int]]()
    alone = data_digest(training, VOCAB, report=lambda done, total: reports.append((done, total)))
    assert data_digest(training, VOCAB, threads=4) == alone
    assert reports[-1] == (2 * TOKENS, 2 * TOKENS)
    assert len(reports) == 20


def count_hashes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    calls, hashed = 0, digest._piece_digest

    def count(piece: Any) -> bytes:
        nonlocal calls
        calls += 1
        return hashed(piece)

    monkeypatch.setattr(digest, "_piece_digest", count)
    return lambda: calls


def test_a_large_set_is_hashed_once_by_a_run_until_its_file_changes(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "CACHED_BYTES", 1)
    calls, training = count_hashes(monkeypatch), Training(data=str(file))
    first = data_digest(training, VOCAB, tmp_path)
    assert data_digest(training, VOCAB, tmp_path) == first
    assert calls() == 1
    os.utime(file, ns=(1, 1))
    assert data_digest(training, VOCAB, tmp_path) == first
    assert calls() == 2
    (tmp_path / "other").mkdir()
    assert data_digest(training, VOCAB, tmp_path / "other") == first  # another run has not read it yet
    assert calls() == 3
    (tmp_path / digest.CACHE).write_text("damaged")
    assert data_digest(training, VOCAB, tmp_path) == first


def test_a_small_set_is_hashed_each_time(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, training = count_hashes(monkeypatch), Training(data=str(file))
    assert data_digest(training, VOCAB, tmp_path) == data_digest(training, VOCAB, tmp_path)
    assert calls() == 2
    assert not (tmp_path / digest.CACHE).exists()
