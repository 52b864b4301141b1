"""Parses `train.data` (stdlib, synthetic, a path, or a weighted mixture) and opens its corpora, early and without torch."""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction

from ultrascale.data.corpora import BYTES, ByteCorpus, Corpus, MixtureCorpus, SyntheticCorpus, TokenFileCorpus, standard_library
from ultrascale.data.sets import TokenSet, largest_token, open_set
from ultrascale.specs.errors import SpecError
from ultrascale.specs.training import Training
from ultrascale.specs.validate import shown

STDLIB, SYNTHETIC = "stdlib", "synthetic"
MOST_PARTS = 1000
LOOKS, LOOK = 64, 256  # windows of a fingerprint, and tokens in each
_WEIGHT = re.compile(r"[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]{1,2})?")


@dataclass(frozen=True)
class MixtureEntry:
    """One text of a mixture, with the name given by the user."""

    name: str
    weight: Fraction


def corpus(training: Training, vocab: int) -> MixtureCorpus:
    """Opens the texts of `train.data`; SpecError if a vocabulary is larger than the model's."""
    trained = _mixture("train.data", training.data, training.seed, vocab)
    if training.eval_data is None:
        return trained
    return replace(trained, held_out=_mixture("train.eval_data", training.eval_data, training.seed, vocab))


def check(training: Training, vocab: int, seq: int) -> None:
    """Raises SpecError unless a run can read its data; takes milliseconds, before any process starts."""
    found = corpus(training, vocab)
    for text, _ in (*found.parts, *(found.held_out.parts if found.held_out is not None else ())):
        two_windows(text, seq)


def absolute(field: str, text: str) -> str:
    """The same value with absolute paths, so that a run finds its data from any folder."""
    found = parts(field, text)
    names = [part.name if part.name in (STDLIB, SYNTHETIC) else os.path.abspath(part.name) for part in found]
    if len(found) == 1:
        return names[0]
    return ",".join(f"{name}:{_decimal(part.weight)}" for name, part in zip(names, found, strict=True))


def _decimal(weight: Fraction) -> str:
    """A weight as a decimal number, as the user wrote it."""
    return format(Decimal(weight.numerator) / Decimal(weight.denominator), "f")


def sampled_fingerprint(training: Training, vocab: int) -> int:
    """A CRC of the lengths of a run's texts and of 65 windows spread over them, as in checkpoints older than data/digest.py."""
    crc = 0
    for text, _ in corpus(training, vocab).parts:
        length = next(length for length in (LOOK, 1) if text.windows(length))
        count = text.windows(length)
        crc = zlib.crc32(f"{length} {count}".encode(), crc)
        for window in sorted({place * (count - 1) // LOOKS for place in range(LOOKS + 1)}):
            crc = zlib.crc32(text.window(window, length).tobytes(), crc)
    return crc


def parts(field: str, text: str) -> tuple[MixtureEntry, ...]:
    """Parses `PATH:0.7,PATH:0.3`, or a single name."""
    if text in (STDLIB, SYNTHETIC) or _exists(text) or ("," not in text and _weighed(text) is None):
        return (MixtureEntry(text, Fraction(1)),)
    found = [_part(field, text, piece.strip()) for piece in text.split(",")]
    if len(found) > MOST_PARTS:
        raise SpecError(f"{field} mixes {len(found):,} texts but at most {MOST_PARTS:,} can be mixed: tokenize some together")
    return tuple(found)


def _part(field: str, text: str, piece: str) -> MixtureEntry:
    weighed = _weighed(piece)
    if weighed is None:
        example = f"{piece.rpartition(':')[0] or piece or 'data/first'}:0.7"
        raise SpecError(
            f"{field} is {shown(text)} but {shown(piece)} has no weight: write each as PATH:WEIGHT with a number above 0, "
            f"such as {example}"
        )
    return weighed


def _weighed(piece: str) -> MixtureEntry | None:
    name, colon, weight = piece.rpartition(":")
    if not colon or not name or _WEIGHT.fullmatch(weight.strip()) is None or not Fraction(weight.strip()):
        return None
    return MixtureEntry(name.strip(), Fraction(weight.strip()))


def _exists(text: str) -> bool:
    return "\0" not in text and os.path.exists(text)


def _mixture(field: str, text: str, seed: int, vocab: int) -> MixtureCorpus:
    return MixtureCorpus(tuple((_text(field, part.name, seed, vocab), part.weight) for part in parts(field, text)))


def _text(field: str, name: str, seed: int, vocab: int) -> Corpus:
    if name == SYNTHETIC:
        return SyntheticCorpus(vocab, seed)
    if name == STDLIB:
        if vocab < BYTES:
            raise SpecError(
                f"{field} is stdlib (bytes: {BYTES} tokens) but model.vocab is {vocab}: try {field}=synthetic, "
                f"or model.vocab={BYTES}"
            )
        return ByteCorpus(standard_library())
    try:
        found = open_set(name)
    except SpecError as error:
        known = "" if "/" in name or os.sep in name else f"; without a path {field} is stdlib or synthetic"
        raise SpecError(f"{field} is {shown(name)}: {error}{known}") from None
    _fits(field, found, vocab)
    return TokenFileCorpus(found, vocab)


def _fits(field: str, found: TokenSet, vocab: int) -> None:
    needed = found.vocab if found.vocab is not None else largest_token(found.tokens) + 1
    if needed > vocab:
        claim = "has a vocabulary of" if found.vocab is not None else "holds tokens up to a vocabulary of"
        raise SpecError(
            f"{field}: {found.path} {claim} {needed:,} but model.vocab is {vocab:,}: try a model with vocab={needed} or more, "
            "or tokenize with a smaller tokenizer"
        )


def two_windows(text: Corpus, seq: int) -> int:
    """The number of windows of the text; SpecError if there are fewer than two."""
    windows = text.windows(seq)
    if windows < 2:
        shorter = next((length for length in (2**power for power in range(20, -1, -1)) if text.windows(length) >= 2), 1)
        where = f" ({text.set.path})" if isinstance(text, TokenFileCorpus) else ""
        raise SpecError(
            f"job.seq is {seq} but the data{where} must hold two such sequences, one to train and one to evaluate: "
            f"try {shorter}"
        )
    return windows
