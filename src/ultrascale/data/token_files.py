"""Token files: our own format, Megatron's and flat ones; opened as memory-mapped arrays.

Our format is a header of 64 bytes, the tokens, and the end of each document:

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

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ultrascale.specs.errors import SpecError, os_reason
from ultrascale.specs.files import open_regular


def cannot_read(path: Path, error: OSError | ValueError) -> SpecError:
    reason = os_reason(error)
    if isinstance(error, FileNotFoundError):
        return SpecError(f"{path} does not exist: name a file or a folder that does")
    return SpecError(f"{path} cannot be read ({reason}): name one that can")


def start_of(path: Path, count: int) -> bytes:
    """The first `count` bytes of a file, or all of a shorter one."""
    try:
        with open_regular(path) as file:
            return file.read(count)
    except OSError as error:
        raise cannot_read(path, error) from None


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except (OSError, ValueError) as error:
        raise cannot_read(path, error) from None


def mapped(path: Path, dtype: np.dtype[Any], offset: int, count: int) -> npt.NDArray[Any]:
    """Part of a file as a memory-mapped array. The caller has checked that the part exists."""
    if count == 0:
        return np.empty(0, dtype)
    try:
        return np.memmap(path, dtype, mode="r", offset=offset, shape=(count,)).view(np.ndarray)
    except (OSError, ValueError) as error:
        raise cannot_read(path, error) from None


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


Arrays = tuple[npt.NDArray[Any], npt.NDArray[Any]]

# The index format of Megatron-LM, megatron/core/datasets/indexed_dataset.py.
_MEGATRON_MAGIC = b"MMIDIDX\0\0"
_INDEX = struct.Struct("<9sQBQQ")  # magic, version, type of a token, sequences, documents + 1
_MEGATRON_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
_LENGTH, _PLACE = np.dtype("<i4"), np.dtype("<i8")
_SEQUENCES_PER_READ = 2**20  # sequences checked at a time, so that a long index takes little memory

# Files that begin so are not flat tokens, whatever their names.
_OTHERS = {
    b"PAR1": "a parquet file",
    b"\x1f\x8b": "a gzip file",
    b"PK\x03\x04": "a zip file",
    b"\x93NUMPY": "a numpy file",
    b"\x28\xb5\x2f\xfd": "a zstandard file",
    struct.pack("<I", 20240520): "a token file of llm.c, with a header",
    b"MMIDIDX": "a Megatron index, which goes beside its .bin",
}


def read_megatron(binary: Path, index: Path) -> Arrays:
    """The tokens and the document ends."""
    start = start_of(index, _INDEX.size)
    if not start.startswith(_MEGATRON_MAGIC):
        raise SpecError(
            f"{index} is no index of Megatron: it must begin with MMIDIDX; write it with Megatron's preprocess_data.py"
        )
    if len(start) < _INDEX.size:
        raise SpecError(f"{index} ends after {len(start)} of the header's {_INDEX.size} bytes: copy it again")
    _, version, code, sequences, marks = _INDEX.unpack(start)
    if version != 1:
        raise SpecError(
            f"{index} is of version {version} but this reads version 1: write it with Megatron's preprocess_data.py"
        )
    dtype = _token_type(index, code)
    lengths_at = _INDEX.size
    places_at = lengths_at + sequences * _LENGTH.itemsize
    marks_at = places_at + sequences * _PLACE.itemsize
    whole = marks_at + marks * _PLACE.itemsize
    size = size_of(index)
    if size not in (whole, whole + sequences):  # one more byte per sequence if Megatron stores its mode
        raise SpecError(
            f"{index} has {size:,} bytes but its header tells of {whole:,} ({sequences:,} sequences): copy it again"
        )
    lengths = mapped(index, _LENGTH, lengths_at, sequences)
    places = mapped(index, _PLACE, places_at, sequences)
    total = _total(index, lengths, places, dtype.itemsize)
    if total == 0:
        raise SpecError(f"{index} holds no tokens: tokenize a text that is not empty")
    if size_of(binary) != total * dtype.itemsize:
        raise SpecError(
            f"{binary} has {size_of(binary):,} bytes but {index.name} tells of {total * dtype.itemsize:,} ({total:,} tokens of "
            f"{dtype.itemsize} bytes): use the two files that were written together"
        )
    ends = _document_ends(index, mapped(index, _PLACE, marks_at, marks), places, dtype.itemsize, total)
    return mapped(binary, dtype, 0, total), ends


def _token_type(index: Path, code: int) -> np.dtype[Any]:
    name = _MEGATRON_TYPES.get(code)
    if name is None or name.startswith("float"):
        text = f"type {code}" if name is None else name
        raise SpecError(f"{index} says that its tokens are {text} but they must be whole numbers, such as uint16 or int32")
    return np.dtype(name).newbyteorder("<")


def _total(index: Path, lengths: npt.NDArray[Any], places: npt.NDArray[Any], width: int) -> int:
    """The total number of tokens; raises unless the sequences are contiguous."""
    total = 0
    for first in range(0, len(lengths), _SEQUENCES_PER_READ):
        part = lengths[first : first + _SEQUENCES_PER_READ].astype(np.int64)
        starts = total + np.cumsum(part) - part
        if part.min() < 0 or not np.array_equal(places[first : first + _SEQUENCES_PER_READ], starts * width):
            raise SpecError(
                f"{index} has sequences that do not lie one after the other: write it with Megatron's preprocess_data.py"
            )
        total += int(part.sum())
    return total


def _document_ends(
    index: Path, marks: npt.NDArray[Any], places: npt.NDArray[Any], width: int, total: int
) -> npt.NDArray[np.int64]:
    """Document ends from Megatron's marks: the first sequence of each document, and finally the number of sequences."""
    if len(marks) < 2 or marks[0] != 0 or marks[-1] != len(places) or np.any(np.diff(marks) < 0):
        raise SpecError(f"{index} has documents that do not cover its {len(places):,} sequences: copy it again")
    inner = marks[1:-1]
    starts = places[inner[inner < len(places)]] // width
    ends = np.append(starts, total).astype(np.int64)
    return np.unique(ends[ends > 0])  # empty documents are dropped


def read_flat(path: Path) -> Arrays:
    """Reads the whole file as two-byte tokens; one document, since the format has no document ends."""
    start, size = start_of(path, 8), size_of(path)
    for magic, what in _OTHERS.items():
        if start.startswith(magic):
            raise SpecError(f"{path} is {what}, not a row of tokens: tokenize its text with `ultrascale data tokenize`")
    if size == 0:
        raise SpecError(f"{path} is empty: name a file that holds tokens")
    if size % 2:
        raise SpecError(
            f"{path} has {size:,} bytes, an odd number, but a file without a header holds tokens of two bytes: copy it again"
        )
    return mapped(path, np.dtype("<u2"), 0, size // 2), np.array([size // 2], dtype=np.int64)
