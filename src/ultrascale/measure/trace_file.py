"""Read PyTorch's traces (Kineto's Chrome format, .json or .json.gz) in blocks of events, since they may be larger than memory.

A trace that was cut off is read as far as it is complete.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pydantic_core import from_json

from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import open_regular

CHUNK = 2**20  # bytes read at a time
MAX_RATIO = 200  # unpacked bytes of a packed one; a trace of torch.profiler on a CPU has 11 to 15, gzip's limit is 1,032
MAX_UNPACKED_FREE = 64 * 2**20  # unpacked bytes for which no ratio is asked: short files of one repeated line
TAIL = 2**16  # characters at a block's end in which its last whole event is looked for
LONGEST = 64 * 2**20  # of one value: what is longer is no event
_DECODE = json.JSONDecoder().raw_decode
_SPACE = re.compile(r"\s+")
_BETWEEN = re.compile(r"\}\s*,\s*\{")  # two objects, at the depth of events or inside one
_COMMA = re.compile(r"\s*,\s*")
_GZIP = b"\x1f\x8b"


class _BrokenTraceError(Exception):
    """The text ends, or is no JSON, before the trace ends."""


@dataclass
class TraceFile:
    """A trace while it is read: iterate over `blocks` once, then the other fields are there."""

    path: Path
    facts: dict[str, Any] = field(default_factory=dict)
    """metadata: rank, process groups, devices"""
    broken: str | None = None
    """why the trace is cut off, if it is"""
    notes: tuple[str, ...] = ()

    def blocks(self) -> Iterator[list[dict[str, Any]]]:
        """Every complete event, some thousand at a time. SpecError for a file that is no trace."""
        try:
            yield from self._all(_JSONReader(_pieces(self.path)))
        except _BrokenTraceError as end:
            self.broken = str(end)
        except OSError as error:
            raise SpecError(
                f"--trace {self.path} cannot be read ({error.strerror or error}): name a .json or .json.gz file"
            ) from None

    def _all(self, text: _JSONReader) -> Iterator[list[dict[str, Any]]]:
        opening = text.peek()
        if opening == "[":  # a bare list of events
            yield from _objects(text)
            return
        if opening != "{":
            raise SpecError(_no_trace(self.path, "it does not begin like JSON"))
        text.take("{")
        found = False
        while text.peek() != "}":
            name = text.value()
            text.take(":")
            if name == "traceEvents" and text.peek() == "[":
                found = True
                yield from _objects(text)
            else:
                self.facts[str(name)] = text.value()
            if text.peek() == ",":
                text.take(",")
        if not found:
            raise SpecError(_no_trace(self.path, "it has no traceEvents"))


def _no_trace(path: Path, why: str) -> str:
    return (
        f"--trace {path} is no trace ({why}): give what torch.profiler's export_chrome_trace wrote (.json, .json.gz), or an "
        "SQLite export of Nsight Systems"
    )


def _pieces(path: Path) -> Iterator[str]:
    """The file's text in pieces, decompressed if it is gzip."""
    if path.is_dir():
        raise SpecError(f"--trace {path} is a folder without traces: name a .json or .json.gz file")
    if not path.exists():
        raise SpecError(f"--trace {path} does not exist: name a .json or .json.gz file that torch.profiler wrote")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with open_regular(path) as file:
        packed = file.read(2) == _GZIP
        file.seek(0)
        for data in _bounded(path, file) if packed else iter(lambda: file.read(CHUNK), b""):
            yield decoder.decode(data)


def _bounded(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    """Decompressed data up to a limit: a gzip file can hold a thousand times its size."""
    most, size = max(MAX_UNPACKED_FREE, MAX_RATIO * os.fstat(file.fileno()).st_size), 0
    for data in _unpacked(file):
        size += len(data)
        if size > most:
            raise SpecError(
                f"--trace {path} unpacks to more than {most:,} bytes, {MAX_RATIO} times its size, which no trace does: "
                "unpack it and look, or record it again"
            )
        yield data


def _unpacked(file: IO[bytes]) -> Iterator[bytes]:
    """Decompress CHUNK bytes at a time. Python's gzip module drops what it has when a file ends too early."""
    unpacker, data = zlib.decompressobj(wbits=31), b""
    while True:
        data = data or file.read(CHUNK)
        try:
            unpacked = unpacker.decompress(data, CHUNK)
        except zlib.error:
            return
        if unpacked:
            yield unpacked
        elif not data:  # nothing left to read or to decompress
            return
        data = unpacker.unconsumed_tail
        if unpacker.eof:
            data = unpacker.unused_data  # the next member of a concatenated file
            unpacker = zlib.decompressobj(wbits=31)


def _objects(text: _JSONReader) -> Iterator[list[dict[str, Any]]]:
    text.take("[")
    while text.peek() != "]":
        yield text.whole_objects()
        if text.peek() not in ",]":
            one = text.value()
            if isinstance(one, dict):
                yield [one]
        if text.peek() == ",":
            text.take(",")
    text.take("]")


class _JSONReader:
    """JSON from a stream, value by value."""

    def __init__(self, pieces: Iterator[str]) -> None:
        self._pieces, self._buffer, self._at, self._read = pieces, "", 0, 0

    def peek(self) -> str:
        """The next character that is no space."""
        while True:
            if (space := _SPACE.match(self._buffer, self._at)) is not None:
                self._at = space.end()
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._more():
                raise _BrokenTraceError(f"it ends after {self._read:,} characters")

    def take(self, character: str) -> None:
        if self.peek() != character:
            raise self._broken()
        self._at += 1

    def value(self) -> Any:
        self.peek()
        while True:
            try:
                found, end = _DECODE(self._buffer, self._at)
            except json.JSONDecodeError:
                if len(self._buffer) - self._at < LONGEST and self._more():
                    continue
                raise self._broken() from None
            except RecursionError:
                raise _BrokenTraceError("it is nested too deeply") from None
            except ValueError:  # an integer with more digits than Python reads
                raise self._broken() from None
            if end == len(self._buffer) and not isinstance(found, dict | list | str) and self._more():
                continue  # a number may continue
            self._at = end
            return found

    def whole_objects(self) -> list[dict[str, Any]]:
        """Objects of a list that are whole in the buffer: nearly all, and faster than value().

        They are parsed at once, by pydantic's parser. What it does not take, such as a lone surrogate, is parsed one by one.
        """
        buffer, at = self._buffer, self._at
        between = [one.start() for one in _BETWEEN.finditer(buffer, max(at, len(buffer) - TAIL))]
        if between:
            try:
                found = from_json(f"[{buffer[at : between[-1] + 1]}]")  # refused if the last one is inside an event
            except ValueError:
                pass
            else:
                self._buffer, self._at = buffer[between[-1] + 1 :], 0
                return [one for one in found if isinstance(one, dict)]
        found = []
        while buffer[at : at + 1] == "{":
            try:
                one, at = _DECODE(buffer, at)
            except (ValueError, RecursionError):
                break
            found.append(one)
            self._at = at
            if (comma := _COMMA.match(buffer, at)) is None:
                break
            self._at = at = comma.end()
        return found

    def _broken(self) -> _BrokenTraceError:
        return _BrokenTraceError(f"what begins at character {self._read - len(self._buffer) + self._at:,} is not whole")

    def _more(self) -> bool:
        """Read as much again as an unfinished value already has, so that all retries together cost as much as reading."""
        wanted, found, size = len(self._buffer) - self._at, [], 0
        for piece in self._pieces:
            found.append(piece)
            size += len(piece)
            if size > wanted:
                break
        self._buffer, self._at = self._buffer[self._at :] + "".join(found), 0
        self._read += size
        return size > 0
