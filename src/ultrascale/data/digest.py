"""A digest of all training data: every token, document ends under a document mask, answers, tokenizer, mixture weights.

The tokens on the disk are hashed, independent of any stored metadata, with BLAKE2b in pieces of 64 MiB, at about 1 GB/s per
thread. A set of 256 MiB or more is hashed once per run; later resumes read it from `data_digests.json` in the run's folder as
long as path, inode, size and modification time of its files are unchanged. Paths are not part of a digest, nor is the seed,
which is compared separately.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from fractions import Fraction
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ultrascale.data import corpora
from ultrascale.data.corpora import ByteCorpus, ConversationCorpus, Corpus, StoredCorpus, TokenFileCorpus
from ultrascale.data.sets import ANSWERS, TOKENS, TokenSet
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import write_text
from ultrascale.specs.training import Training

CACHE = "data_digests.json"
PIECE_BYTES = 64 * 2**20
CACHED_BYTES = 256 * 2**20  # a quarter of a second to hash: smaller sets are not cached
Report = Callable[[int, int], None]
"""called with the bytes hashed so far and the total"""


def data_digest(training: Training, vocab: int, run: Path | None = None, threads: int = 1, report: Report | None = None) -> str:
    """The digest of a run's training data. `run`: the folder with the digests that this run has cached."""
    parts = corpora.corpus(training, vocab).parts
    with_ends = bool(training.document_mask)
    whole = sum((weight for _, weight in parts), Fraction(0))
    hashing = _Hashing(run, threads, report, sum(_bytes(text, with_ends) for text, _ in parts))
    lines = [
        f"{weight / whole} {hashing.text(text, with_ends)}"  # 0.7 and 0.3 are the same mixture as 7 and 3
        for text, weight in parts
    ]
    return blake2b("\n".join([f"vocab {vocab}", *lines]).encode(), digest_size=16).hexdigest()


class _Hashing:
    def __init__(self, run: Path | None, threads: int, report: Report | None, total: int) -> None:
        self._run, self._threads, self._report = run, threads, report
        self._done, self._total = 0, total

    def text(self, text: Corpus, with_ends: bool) -> str:
        if isinstance(text, ByteCorpus):
            return f"bytes {self._array(text.tokens)}"  # a zero byte ends a document: ends follow from the bytes
        if not isinstance(text, TokenFileCorpus):
            return "synthetic"
        key = _identity(text.set, with_ends) if _bytes(text, with_ends) >= CACHED_BYTES else None
        known = _cached(self._run) if self._run is not None and key is not None else {}
        if key is None or key not in known:
            known[key or ""] = self._set(text.set, with_ends)
            if key is not None and self._run is not None and self._run.is_dir():
                with suppress(SpecError):  # the folder is not writable: the next resume hashes again
                    write_text(self._run / CACHE, json.dumps(known, indent=1) + "\n")
        return known[key or ""]

    def _set(self, tokens: TokenSet, with_ends: bool) -> str:
        tokenizer = tokens.facts.tokenizer_sha256 if tokens.facts is not None else None
        words = [f"tokens {tokens.tokens.dtype.str} {self._array(tokens.tokens)}", f"tokenizer {tokenizer}"]
        if with_ends or tokens.answers is not None:  # conversations are packed by their ends
            words.append(f"ends {self._array(tokens.ends)}")
        if tokens.answers is not None:
            words.append(f"answers {self._array(tokens.answers)}")
        return " ".join(words)

    def _array(self, array: npt.NDArray[Any]) -> str:
        data = np.ascontiguousarray(array).view(np.uint8)
        pieces = [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]
        combined = blake2b(f"{len(data)}".encode(), digest_size=16)
        several = self._threads > 1 and len(pieces) > 1
        with ThreadPoolExecutor(self._threads) if several else nullcontext() as pool:
            digests = map(_piece_digest, pieces) if pool is None else pool.map(_piece_digest, pieces)
            for piece, digest in zip(pieces, digests, strict=True):
                combined.update(digest)
                self._done += len(piece)
                if self._report is not None:
                    self._report(self._done, self._total)
        return combined.hexdigest()


def _piece_digest(piece: npt.NDArray[np.uint8]) -> bytes:
    return blake2b(piece.data, digest_size=16).digest()


def _bytes(text: Corpus, with_ends: bool) -> int:
    if not isinstance(text, StoredCorpus):
        return 0
    if isinstance(text, ConversationCorpus):
        return text.tokens.nbytes + text.ends.nbytes + text.answers.nbytes
    ends = text.ends.nbytes if with_ends and isinstance(text, TokenFileCorpus) else 0
    return text.tokens.nbytes + ends


def _identity(tokens: TokenSet, with_ends: bool) -> str | None:
    """A key that changes when a set's files are replaced or modified; None if they cannot be stat'ed."""
    if tokens.path.is_dir():
        files = [tokens.path / TOKENS, *([] if tokens.answers is None else [tokens.path / ANSWERS])]
    elif tokens.kind == "megatron":
        prefix = str(tokens.path).removesuffix(".bin")
        files = [Path(f"{prefix}.bin"), Path(f"{prefix}.idx")]
    else:
        files = [tokens.path]
    try:
        found = [(os.path.realpath(file), os.stat(file)) for file in files]
    except OSError:
        return None
    words = [f"{path} inode {one.st_ino} size {one.st_size} mtime {one.st_mtime_ns}" for path, one in found]
    return "; ".join([*words, f"ends {with_ends}"])


def _cached(run: Path) -> dict[str, str]:
    try:
        found = json.loads((run / CACHE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
