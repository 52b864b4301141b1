"""Tokenizers: any `tokenizer.json` of Hugging Face's tokenizers, or UTF-8 bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ultrascale.data.sources import Spans
from ultrascale.data.token_files import cannot_read, smallest_type
from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.files import MAX_TOKENIZER_BYTES, read_bytes
from ultrascale.specs.validate import shown

Ids = npt.NDArray[Any]

# Names of end-of-document tokens, the unambiguous ones first.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "<|eot_id|>", "[SEP]")


class Tokenizer(Protocol):
    name: str
    sha256: str | None
    """hash of its file"""
    vocab: int
    eod: int
    """the token that ends a document"""

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """The tokens of each text, without end-of-document tokens."""
        ...

    def encode_answers(self, texts: Sequence[str], answers: Sequence[Spans]) -> list[tuple[Ids, Ids]]:
        """The tokens of each text, and 1 for each that has a part of an answer, 0 for the others.

        Never the first: nothing before it predicts it.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, without special ones; bytes that are no character become �."""
        ...


class ByteTokenizer:
    """UTF-8 bytes; a zero byte ends a document."""

    def __init__(self) -> None:
        self.name, self.vocab, self.eod = "bytes", 256, 0
        self.sha256: str | None = None

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(smallest_type(self.vocab)) for text in texts]

    def encode_answers(self, texts: Sequence[str], answers: Sequence[Spans]) -> list[tuple[Ids, Ids]]:
        widths = [np.array([len(sign.encode()) for sign in text]) for text in texts]
        stops = [np.repeat(np.arange(1, len(one) + 1), one) for one in widths]  # the characters that bytes are of
        masks = [_mask(np.stack((stop - 1, stop), axis=1), spans) for stop, spans in zip(stops, answers, strict=True)]
        return list(zip(self.encode(texts), masks, strict=True))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if 0 < token < self.vocab).decode(errors="replace")


class FileTokenizer:
    """A `tokenizer.json`. Special tokens spelled out in a text are encoded as text: only the end of a document gives `eod`."""

    def __init__(self, path: Path, eod: str | int | None, chat: bool = False) -> None:
        """`eod`: the end-of-document token, by name or number, if the file has none with a known name. `chat`: texts are made
        by a chat template, in which special tokens are spelled out.
        """
        content = _content(path)
        self.name = path.name
        self.sha256: str | None = hashlib.sha256(content).hexdigest()
        self._tokenizer = _load(path, content)
        known: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not known:
            raise SpecError(f"--tokenizer is {path} but its vocabulary is empty: name a trained tokenizer.json")
        self.vocab = max(known.values()) + 1  # not their number: some vocabularies have gaps
        self.eod = eod if isinstance(eod, int) else _end(path, known, eod)
        self._type = smallest_type(self.vocab)
        self._tokenizer.encode_special_tokens = not chat

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=self._type) for one in found]

    def encode_answers(self, texts: Sequence[str], answers: Sequence[Spans]) -> list[tuple[Ids, Ids]]:
        found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        masks = [_mask(np.array(one.offsets).reshape(-1, 2), spans) for one, spans in zip(found, answers, strict=True)]
        return [(np.array(one.ids, dtype=self._type), mask) for one, mask in zip(found, masks, strict=True)]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def prompt(self, text: str) -> list[int]:
        """The tokens of a prompt with what the file prepends to one, such as a first token of its own."""
        return list(self._tokenizer.encode(text, add_special_tokens=True).ids)


def _mask(offsets: Ids, spans: Spans) -> Ids:
    """`offsets` [n, 2]: the characters of each token, from the first to behind the last."""
    mask = np.zeros(len(offsets), dtype=np.uint8)
    starts, stops = offsets.T
    for start, stop in spans:
        mask[np.searchsorted(stops, start, side="right") : np.searchsorted(starts, stop)] = 1
    mask[:1] = 0
    return mask


def load(path: Path | None, eod: str | None = None, chat: bool = False) -> Tokenizer:
    """The tokenizer of a file, or bytes. `eod`, `chat`: as of FileTokenizer."""
    if path is not None:
        return FileTokenizer(path, eod, chat)
    if eod is not None:
        raise SpecError(
            f"--eod is {shown(eod)} but bytes end a document with a zero byte: leave --eod out, or give --tokenizer"
        )
    return ByteTokenizer()


def _content(path: Path) -> bytes:
    try:
        return read_bytes(path, MAX_TOKENIZER_BYTES)
    except IsADirectoryError:
        raise SpecError(f"--tokenizer is {path}, a folder: name the file in it, such as {path / 'tokenizer.json'}") from None
    except OSError as error:
        raise SpecError(f"--tokenizer: {cannot_read(path, error)}") from None


def _load(path: Path, content: bytes) -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise SpecError(
            "--tokenizer needs the tokenizers package, which is not installed: try pip install 'ultrascale[data]', or leave "
            "--tokenizer out for bytes"
        ) from None
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the package raises no narrower class
        reason = str(error).splitlines()[0][:120]
        raise SpecError(
            f"--tokenizer is {path} but it is no tokenizer.json ({reason}): name one of Hugging Face's format"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _end(path: Path, known: dict[str, int], eod: str | None) -> int:
    if eod is not None:
        if eod not in known:
            raise SpecError(f"--eod is {shown(eod)} but {path} has no such token: {nearest(eod, _special(known))[:300]}")
        return known[eod]
    for name in _ENDS:
        if name in known:
            return known[name]
    example = (_special(known) or ["TOKEN"])[0]
    raise SpecError(f"{path} has no token that we know to end a document: name it, such as --eod '{example}'")


def _special(known: dict[str, int]) -> list[str]:
    """Tokens that look like special tokens, the likeliest ends of documents."""
    return sorted(name for name in known if len(name) > 2 and name[0] in "<[" and name[-1] in ">]") or sorted(known)[:20]
