"""Readers of other token formats: Megatron's `.bin` with its `.idx`, and flat uint16 files as nanoGPT writes them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ultrascale.data.reading import mapped, size_of, start_of
from ultrascale.specs.errors import SpecError

Arrays = tuple[npt.NDArray[Any], npt.NDArray[Any]]

# The index format of Megatron-LM, megatron/core/datasets/indexed_dataset.py.
_MAGIC = b"MMIDIDX\0\0"
_INDEX = struct.Struct("<9sQBQQ")  # magic, version, type of a token, sequences, documents + 1
_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
_LENGTH, _PLACE = np.dtype("<i4"), np.dtype("<i8")
_AT_ONCE = 2**20  # sequences checked at a time, so that a long index takes little memory

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
    if not start.startswith(_MAGIC):
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
    name = _TYPES.get(code)
    if name is None or name.startswith("float"):
        text = f"type {code}" if name is None else name
        raise SpecError(f"{index} says that its tokens are {text} but they must be whole numbers, such as uint16 or int32")
    return np.dtype(name).newbyteorder("<")


def _total(index: Path, lengths: npt.NDArray[Any], places: npt.NDArray[Any], width: int) -> int:
    """The total number of tokens; raises unless the sequences are contiguous."""
    total = 0
    for first in range(0, len(lengths), _AT_ONCE):
        part = lengths[first : first + _AT_ONCE].astype(np.int64)
        starts = total + np.cumsum(part) - part
        if part.min() < 0 or not np.array_equal(places[first : first + _AT_ONCE], starts * width):
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
