"""The token file format: a header of 64 bytes, the tokens, and the end of each document.

| bytes | content |
|---|---|
| 0–7 | `ultratok` |
| 8–11 | version, 1 |
| 12–15 | bytes of a token: 2 (uint16) or 4 (uint32) |
| 16–23 | tokens |
| 24–31 | documents |
| 32–39 | vocabulary: all tokens are smaller |
| 40–43 | CRC-32 of the 40 bytes before |
| 44–63 | zero |

All integers are little-endian. The tokens begin at byte 64, padded with zeros to a multiple of eight; the ends of the documents
follow, 64 bits each: the number of tokens up to and including the document's last one.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ultrascale.data.reading import mapped, size_of, start_of
from ultrascale.specs.errors import SpecError

MAGIC = b"ultratok"
VERSION = 1
HEADER_BYTES = 64
END = np.dtype("<u8")

_FIELDS = struct.Struct("<8sIIQQQ")
_SUM = struct.Struct("<I")
_TYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


@dataclass(frozen=True)
class Header:
    dtype: np.dtype[Any]
    tokens: int
    documents: int
    vocab: int

    def pack(self) -> bytes:
        fields = _FIELDS.pack(MAGIC, VERSION, self.dtype.itemsize, self.tokens, self.documents, self.vocab)
        return (fields + _SUM.pack(zlib.crc32(fields))).ljust(HEADER_BYTES, b"\0")

    @property
    def ends_at(self) -> int:
        """The byte offset of the document ends."""
        return HEADER_BYTES + self.tokens * self.dtype.itemsize + self.padding

    @property
    def padding(self) -> int:
        return -self.tokens * self.dtype.itemsize % END.itemsize

    @property
    def bytes(self) -> int:
        return self.ends_at + self.documents * END.itemsize


def smallest_type(vocab: int) -> np.dtype[Any]:
    return _TYPES[2 if vocab <= 2**16 else 4]


def read_header(path: Path) -> Header:
    start = start_of(path, HEADER_BYTES)
    if not start.startswith(MAGIC):
        raise SpecError(
            f"{path} is no token file: it must begin with {MAGIC.decode()}; make one with `ultrascale data tokenize`"
        )
    if len(start) < HEADER_BYTES:
        raise SpecError(f"{path} ends after {len(start)} of the header's {HEADER_BYTES} bytes: tokenize it anew")
    _, version, width, tokens, documents, vocab = _FIELDS.unpack_from(start)
    if version != VERSION:
        raise SpecError(f"{path} is a token file of version {version} but this reads version {VERSION}: tokenize it anew")
    if _SUM.unpack_from(start, _FIELDS.size)[0] != zlib.crc32(start[: _FIELDS.size]):
        raise SpecError(f"{path} has a damaged header (its check sum does not match): tokenize it anew")
    if width not in _TYPES:
        raise SpecError(f"{path} says {width} bytes a token but must say 2 or 4: tokenize it anew")
    header = Header(_TYPES[width], tokens, documents, vocab)
    size = size_of(path)
    if size != header.bytes:
        raise SpecError(
            f"{path} has {size:,} bytes but its header tells of {header.bytes:,} ({tokens:,} tokens, {documents:,} documents"
            "): copy it again, or tokenize anew"
        )
    return header


def read(path: Path) -> tuple[Header, npt.NDArray[Any], npt.NDArray[Any]]:
    """The header, the tokens and the document ends, memory-mapped."""
    header = read_header(path)
    if not header.tokens:
        raise SpecError(f"{path} holds no tokens: tokenize a text that is not empty")
    ends = mapped(path, END, header.ends_at, header.documents)
    if not header.documents or ends[-1] != header.tokens:
        raise SpecError(f"{path} has {header.tokens:,} tokens but its last document ends elsewhere: tokenize it anew")
    return header, mapped(path, header.dtype, HEADER_BYTES, header.tokens), ends


def write(path: Path, tokens: npt.ArrayLike, ends: npt.ArrayLike, vocab: int) -> None:
    """Writes a whole file from arrays in memory, atomically."""
    token_array, end_array = np.asarray(tokens).astype(smallest_type(vocab)), np.asarray(ends).astype(END)
    header = Header(smallest_type(vocab), len(token_array), len(end_array), vocab)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(header.pack() + token_array.tobytes() + bytes(header.padding) + end_array.tobytes())
    os.replace(temporary, path)
