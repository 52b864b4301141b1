"""Token sets: opens a folder of `ultrascale data tokenize`, one of our token files, Megatron's, or a flat file; sums one up."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from ultrascale.data import token_files
from ultrascale.data.token_files import cannot_read, mapped, size_of, start_of
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import read_mapping
from ultrascale.specs.validate import FrozenSpec, build

FACTS, TOKENS, ANSWERS = "data.json", "tokens.bin", "answers.bin"
Kind = Literal["ultrascale", "megatron", "flat"]


class TokenizedInputs(FrozenSpec):
    """The input files of a token set."""

    path: str
    files: int = Field(ge=1)
    bytes: int = Field(ge=0)
    field: str
    digest: str | None = Field(default=None, description="of the files' names and content; None: made before it was kept")


class TokenSetMetadata(FrozenSpec):
    """data.json: the contents of a tokenized folder and their source."""

    tokenizer: str = Field(description="its file's name; bytes: none")
    tokenizer_sha256: str | None = None
    vocab: int = Field(ge=1)
    eod: int = Field(ge=0, description="the token that ends each document")
    tokens: int = Field(ge=1)
    documents: int = Field(ge=1)
    dtype: Literal["uint16", "uint32"]
    answers: int | None = Field(default=None, ge=1, description="tokens of the assistant's messages; None: no conversations")
    template_sha256: str | None = Field(default=None, description="of the chat template")
    inputs: TokenizedInputs


@dataclass(frozen=True)
class TokenSet:
    """Memory-mapped tokens and document ends: the number of tokens up to and including each document's last."""

    path: Path
    kind: Kind
    tokens: npt.NDArray[Any]
    ends: npt.NDArray[Any]
    vocab: int | None
    """all tokens are smaller; None if unknown"""
    facts: TokenSetMetadata | None = None
    answers: npt.NDArray[np.uint8] | None = None
    """of conversations: 1 for each token of an answer, 0 for the others"""


def open_set(name: str | os.PathLike[str]) -> TokenSet:
    """Opens the token set at a path; reads only headers and indices."""
    path = Path(name)
    index = path.with_name(path.name + ".idx") if path.name else path
    try:
        folder, file, prefix = path.is_dir(), path.is_file(), index.is_file()
        if not prefix:
            path.stat()
    except (OSError, ValueError) as error:
        raise cannot_read(path, error) from None
    if folder:
        return _folder(path)
    if file:
        return _file(path)
    if prefix:  # the common name of Megatron's two files, without suffix
        return _megatron(path, path.with_name(path.name + ".bin"), index)
    raise SpecError(f"{path} is a device: name a file or a folder of tokens")


def _folder(path: Path) -> TokenSet:
    if not (path / FACTS).exists():
        files = sorted(file.stem for file in path.glob("*.bin"))[:1]
        hint = (
            f"name one of its files, such as {path / files[0]}.bin"
            if files
            else f"make one: ultrascale data tokenize TEXTS -o {path}"
        )
        raise SpecError(f"{path} holds no {FACTS} and is no set that `ultrascale data tokenize` made: {hint}")
    facts = build(TokenSetMetadata, read_mapping(path / FACTS, "data"), str(path / FACTS))
    header, tokens, ends = token_files.read(path / TOKENS)
    stated, found = (facts.tokens, facts.documents, facts.vocab), (header.tokens, header.documents, header.vocab)
    if stated != found:
        raise SpecError(
            f"{path / FACTS} tells of {stated[0]:,} tokens in {stated[1]:,} documents and a vocabulary of {stated[2]:,}, but "
            f"{TOKENS} holds {found[0]:,}, {found[1]:,} and {found[2]:,}: use the two files that were written together"
        )
    return TokenSet(path, "ultrascale", tokens, ends, facts.vocab, facts, _answers(path, facts))


def _answers(path: Path, facts: TokenSetMetadata) -> npt.NDArray[np.uint8] | None:
    if facts.answers is None:
        return None
    file = path / ANSWERS
    if (size := size_of(file)) != facts.tokens:
        raise SpecError(f"{file} has {size:,} bytes but must have one for each of {facts.tokens:,} tokens: tokenize it anew")
    return mapped(file, np.dtype(np.uint8), 0, size)


def _file(path: Path) -> TokenSet:
    if path.suffix != ".bin":
        raise SpecError(f"{path} is no token file (.bin): make some of a text with `ultrascale data tokenize {path} -o tokens`")
    if start_of(path, len(token_files.MAGIC)) == token_files.MAGIC:
        header, tokens, ends = token_files.read(path)
        return TokenSet(path, "ultrascale", tokens, ends, header.vocab)
    index = path.with_suffix(".idx")
    if index.exists():
        return _megatron(path, path, index)
    return TokenSet(path, "flat", *token_files.read_flat(path), vocab=None)


def _megatron(name: Path, tokens: Path, index: Path) -> TokenSet:
    return TokenSet(name, "megatron", *token_files.read_megatron(tokens, index), vocab=None)


def largest_token(tokens: npt.NDArray[Any], spots: int = 64, length: int = 2**16) -> int:
    """The largest token of evenly spaced ranges; of all tokens of a small set."""
    starts = np.unique(np.linspace(0, max(0, len(tokens) - length), spots).astype(np.int64))
    return max(int(tokens[start : start + length].max()) for start in starts)


_DOCUMENTS_PER_READ = 2**20  # documents


@dataclass(frozen=True)
class TokenSetSummary:
    path: str
    kind: Kind
    tokens: int
    documents: int
    dtype: str
    vocab: int | None
    """all tokens are smaller; None if the files do not say"""
    largest_seen: int
    """the largest of the tokens sampled: all of a small set, some ranges of a large one"""
    longest_document: int
    mean_document: float
    facts: TokenSetMetadata | None


def info(path: str | os.PathLike[str]) -> TokenSetSummary:
    found = open_set(path)
    return TokenSetSummary(
        path=os.fspath(path),
        kind=found.kind,
        tokens=len(found.tokens),
        documents=len(found.ends),
        dtype=found.tokens.dtype.name,
        vocab=found.vocab,
        largest_seen=largest_token(found.tokens),
        longest_document=_longest(found, found.ends),
        mean_document=len(found.tokens) / len(found.ends),
        facts=found.facts,
    )


def _longest(found: TokenSet, ends: npt.NDArray[Any]) -> int:
    """The longest document. Reads every document end, so that it also detects unordered ones."""
    longest = before = 0
    for first in range(0, len(ends), _DOCUMENTS_PER_READ):
        lengths = np.diff(ends[first : first + _DOCUMENTS_PER_READ].astype(np.int64), prepend=before)
        if lengths.min() <= 0:
            place = first + int(np.argmin(lengths)) + 1
            raise SpecError(
                f"{found.path} has a damaged list of documents: number {place:,} ends before it begins; tokenize it anew"
            )
        longest, before = max(longest, int(lengths.max())), int(ends[min(first + _DOCUMENTS_PER_READ, len(ends)) - 1])
    return longest
