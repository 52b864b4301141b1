"""A summary of a token set, for `ultrascale data info`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ultrascale.data.sets import Kind, TokenSet, TokenSetMetadata, largest_token, open_set
from ultrascale.specs.errors import SpecError

_AT_ONCE = 2**20  # documents


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
    for first in range(0, len(ends), _AT_ONCE):
        lengths = np.diff(ends[first : first + _AT_ONCE].astype(np.int64), prepend=before)
        if lengths.min() <= 0:
            place = first + int(np.argmin(lengths)) + 1
            raise SpecError(
                f"{found.path} has a damaged list of documents: number {place:,} ends before it begins; tokenize it anew"
            )
        longest, before = max(longest, int(lengths.max())), int(ends[min(first + _AT_ONCE, len(ends)) - 1])
    return longest
