"""Reads documents from `.txt` (one per file), `.jsonl`, `.jsonl.gz` and `.parquet` files (one per line or row), by parts.

A part is the input of one worker task. Parts depend only on the bytes of the files, not on the number of workers. A document is
read in chunks of about a megabyte at most, split at line ends: memory use does not grow with the input.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

from ultrascale.data.corpora import STDLIB, library_sources
from ultrascale.data.token_files import cannot_read, size_of
from ultrascale.specs.errors import SpecError, os_reason
from ultrascale.specs.files import open_regular
from ultrascale.specs.units import groups_up_to
from ultrascale.specs.validate import kind_of, shown

Spans = tuple[tuple[int, int], ...]
"""from the first character to behind the last"""

PIECE = 2**20  # maximum bytes (or characters) of one text given to the tokenizer


@dataclass(frozen=True)
class InputSpan:
    """Bytes (.txt, .jsonl) or row groups (.parquet) from `start` to `stop` of a file; gzip files are not split."""

    file: str
    size: int
    digest: str
    """digest of the whole file's content"""
    start: int
    stop: int
    cost: int
    """bytes on disk, for progress"""


@dataclass(frozen=True)
class InputPart:
    """The input of one worker task: some spans, one after the other."""

    spans: tuple[InputSpan, ...]

    @property
    def cost(self) -> int:
        return sum(span.cost for span in self.spans)


@dataclass(frozen=True)
class DocumentChunk:
    """A chunk of one document. `last`: it ends the document. `place`: how much of the span's, then the part's, cost is read."""

    text: str
    last: bool
    place: int
    answers: Spans = ()
    """of a conversation: the characters that the assistant wrote"""


def checked(text: Any, field: str) -> str:
    if not isinstance(text, str):
        raise SpecError(f"has {shown(text)} in its field {field!r} but must have text: name another with --field")
    if not text.isascii() and any("\ud800" <= sign <= "\udfff" for sign in text):
        raise SpecError(f"has half a character (a lone surrogate) in its field {field!r}: repair it or take it out")
    return text


def pieces(text: str, place: int) -> Iterator[DocumentChunk]:
    start = 0
    while len(text) - start > PIECE:
        stop = text.rfind("\n", start + PIECE // 2, start + PIECE) + 1 or start + PIECE
        yield DocumentChunk(text[start:stop], False, place)
        start = stop
    if text:
        yield DocumentChunk(text[start:] if start else text, True, place)


SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".parquet")


class RecordFormat(Protocol):
    """What a record, a line of JSON or a row of parquet, holds."""

    name: str
    """of the field, in data.json"""
    suffixes: tuple[str, ...]
    """of the files that are read"""

    def columns(self, path: Path, schema: Any) -> list[str]:
        """The columns to read of a parquet file with this schema; SpecError if it has none."""
        ...

    def chunks(self, record: Mapping[str, Any], place: int) -> Iterator[DocumentChunk]:
        """The document of a record; SpecError, without file and line, if it has none."""
        ...


class TextField:
    """Records with a text in one field."""

    suffixes: tuple[str, ...] = SUFFIXES

    def __init__(self, name: str) -> None:
        self.name = name

    def columns(self, path: Path, schema: Any) -> list[str]:
        import pyarrow  # type: ignore[import-untyped]

        if self.name not in schema.names:
            raise SpecError(
                f"{path} has no column {shown(self.name)} (it has: {', '.join(schema.names[:8])}): name the text's with --field"
            )
        kind = schema.field(self.name).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise SpecError(
                f"{path} holds {kind} in its column {shown(self.name)} but must hold text: name another with --field"
            )
        return [self.name]

    def chunks(self, record: Mapping[str, Any], place: int) -> Iterator[DocumentChunk]:
        if self.name not in record:
            others = ", ".join(map(str, list(record)[:8])) or "none"
            raise SpecError(f"has no field {shown(self.name)} (it has: {others}): name the text's field with --field")
        yield from pieces(checked(record[self.name], self.name), place)


PART = 2**23  # bytes of a part
LONGEST_LINE = 2**28  # bytes of a line of JSON; a file with longer lines is hardly JSONL
_HASHED = 2**20  # bytes of a file that are hashed at a time
_LOOK_AHEAD = 2**16  # bytes within which a line end is searched


def find(source: str, suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    """The files in a folder and its subfolders, sorted, without hidden ones; or a single file; or the standard library."""
    if source == STDLIB and not os.path.exists(source):
        return library_sources()
    root = Path(source)
    try:
        if not root.is_dir():
            root.stat()
            if not root.name.endswith(suffixes):
                raise SpecError(f"{root} is none of {', '.join(suffixes)}: name such a file, or a folder of them")
            return [root]
        found = sorted(_below(root, suffixes), key=lambda path: path.relative_to(root).parts)
    except (OSError, ValueError) as error:
        raise error if isinstance(error, SpecError) else cannot_read(root, error) from None
    if not found:
        raise SpecError(f"{root} holds no file that ends in {', '.join(suffixes)}: name a folder of texts")
    return found


def _below(root: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise error

    for folder, below, files in os.walk(root, onerror=refuse):
        below[:] = [name for name in below if not name.startswith(".")]
        yield from (Path(folder) / name for name in files if name.endswith(suffixes) and not name.startswith("."))


def digests(files: list[Path], threads: int = 1) -> list[str]:
    """A digest of each file's content. SpecError for a file that is not regular.

    BLAKE2b takes 3 ns of CPU time per byte, SHA-256 takes 5: measured on 256 MiB, on a shared core.
    """
    with ThreadPoolExecutor(min(threads, len(files))) as pool:  # hashlib releases the GIL
        return list(pool.map(_digest, files))


def _digest(path: Path) -> str:
    found = hashlib.blake2b(digest_size=32)
    try:
        with open_regular(path) as file:
            while block := file.read(_HASHED):
                found.update(block)
    except OSError as error:
        raise cannot_read(path, error) from None
    return found.hexdigest()


def cut(files: list[Path], contents: list[str], form: RecordFormat, length: int = PART) -> list[InputPart]:
    """Splits all files into parts, in order: long files into many, several short ones in one. `contents`: file digests."""
    spans = (span for file, digest in zip(files, contents, strict=True) for span in _spans(file, digest, form, length))
    return [InputPart(tuple(part)) for part in groups_up_to(length, spans, lambda span: span.cost)]


def _spans(path: Path, digest: str, form: RecordFormat, length: int) -> Iterator[InputSpan]:
    size = size_of(path)
    if path.name.endswith(".parquet"):
        yield from _parquet_spans(path, form, size, digest, length)
    elif path.name.endswith(".gz"):
        yield InputSpan(str(path), size, digest, 0, size, size)
    else:
        for start in range(0, size, length):
            stop = min(size, start + length)
            yield InputSpan(str(path), size, digest, start, stop, stop - start)


def read(part: InputPart, form: RecordFormat) -> Iterator[DocumentChunk]:
    """The documents of a part, in chunks; SpecError with file and line for an unreadable document."""
    before = 0
    for span in part.spans:
        for piece in _read(span, form):
            yield replace(piece, place=before + min(piece.place, span.cost))  # a line may end after its span
        before += span.cost


def _read(span: InputSpan, form: RecordFormat) -> Iterator[DocumentChunk]:
    name = span.file
    try:
        if name.endswith(".parquet"):
            yield from _read_parquet(span, form)
        elif name.endswith(".gz"):
            with open(name, "rb") as packed, gzip.open(packed, "rb") as file:
                for number, line in enumerate(iter(partial(_line, file, name), b""), 1):
                    yield from _document(line, form, f"{name}, line {number}".__str__, min(packed.tell(), span.size))
        elif name.endswith(".jsonl"):
            yield from _json_lines(span, form)
        else:
            yield from _text(span)
    except (OSError, EOFError, zlib.error) as error:
        reason = os_reason(error)
        raise SpecError(f"{name} cannot be read ({reason}): repair it or take it out") from None


def _json_lines(span: InputSpan, form: RecordFormat) -> Iterator[DocumentChunk]:
    """The lines that begin in the span; the last may end after it."""
    with open(span.file, "rb") as file:
        place = 0
        if span.start:  # the line that crosses the start belongs to the span before
            file.seek(span.start - 1)
            place = span.start - 1 + len(_line(file, span.file))
        while place < span.stop:
            line = _line(file, span.file)
            begun, place = place, place + len(line)
            yield from _document(line, form, partial(_line_of, span.file, begun), place - span.start)


def _line(file: IO[bytes] | gzip.GzipFile, name: str) -> bytes:
    line = file.readline(LONGEST_LINE + 1)
    if len(line) > LONGEST_LINE:
        raise SpecError(f"{name} has a line of more than {LONGEST_LINE:,} bytes: write a document a line, or name it .txt")
    return line


def _line_of(name: str, place: int) -> str:
    """The file and the line number at a byte offset, counted only for an error message."""
    number = 1
    with open(name, "rb") as file:
        while place > 0 and (block := file.read(min(PIECE, place))):
            number += block.count(b"\n")
            place -= len(block)
    return f"{name}, line {number}"


def _document(line: bytes, form: RecordFormat, where: Callable[[], str], place: int) -> Iterator[DocumentChunk]:
    if not line.strip():
        return
    try:
        yield from form.chunks(_record(line, form), place)
    except SpecError as error:
        raise SpecError(f"{where()} {error}") from None


def _record(line: bytes, form: RecordFormat) -> Mapping[str, Any]:
    try:
        record = json.loads(line.removeprefix(BOM_UTF8).decode())
    except UnicodeDecodeError:
        raise SpecError("is not UTF-8: convert the file, or take the line out") from None
    except json.JSONDecodeError as error:
        raise SpecError(f"is not JSON ({error.msg.lower()}): repair it or take it out") from None
    except (RecursionError, ValueError):
        raise SpecError("is no record of fields and values: repair it or take it out") from None
    if not isinstance(record, dict):
        raise SpecError(f"is {kind_of(record)} but must be a mapping of fields to values, such as {{{form.name!r}: …}}")
    return record


def _text(span: InputSpan) -> Iterator[DocumentChunk]:
    """The text of a span. A file is one document, which ends with its last span."""
    with open(span.file, "rb") as file:
        start = _line_end(file, span.start, span.size)
        for mark in [*range(span.start + PIECE, span.stop, PIECE), span.stop]:
            stop = _line_end(file, mark, span.size)
            file.seek(start)
            block = file.read(stop - start)
            try:
                text = block.decode("utf-8-sig" if start == 0 else "utf-8")
            except UnicodeDecodeError as error:
                raise SpecError(
                    f"{span.file} is not UTF-8 at byte {start + error.start:,}: convert it, or take it out"
                ) from None
            yield DocumentChunk(text, mark == span.size, stop - span.start)
            start = stop


def _line_end(file: IO[bytes], mark: int, size: int) -> int:
    """The split position near a mark: after the next line end, else the next space, else the next whole character."""
    if mark in (0, size):
        return mark
    file.seek(mark - 1)
    ahead = file.read(_LOOK_AHEAD)
    for sign in (b"\n", b" "):
        if (place := ahead.find(sign)) >= 0:
            return mark + place
    place = 1
    while place < len(ahead) and ahead[place] & 0xC0 == 0x80:  # a byte within a character
        place += 1
    return mark - 1 + place


_ROWS = 64  # rows converted to Python strings at a time


def _parquet_spans(path: Path, form: RecordFormat, size: int, digest: str, length: int) -> Iterator[InputSpan]:
    groups = _opened(path, form)[0].metadata
    start = group_bytes = 0
    for group in range(groups.num_row_groups):
        group_bytes += groups.row_group(group).total_byte_size
        if group_bytes >= length or group + 1 == groups.num_row_groups:
            share = size * (group + 1) // groups.num_row_groups - size * start // groups.num_row_groups
            yield InputSpan(str(path), size, digest, start, group + 1, share)
            start, group_bytes = group + 1, 0


def _read_parquet(span: InputSpan, form: RecordFormat) -> Iterator[DocumentChunk]:
    import pyarrow

    try:
        yield from _rows(span, form)
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0][:100]
        raise SpecError(f"{span.file} cannot be read ({reason}): repair it or take it out") from None


def _rows(span: InputSpan, form: RecordFormat) -> Iterator[DocumentChunk]:
    file, columns = _opened(Path(span.file), form)
    counts = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
    before, total, done = sum(counts[: span.start]), sum(counts[span.start : span.stop]), 0
    for batch in file.iter_batches(_ROWS, row_groups=list(range(span.start, span.stop)), columns=columns, use_threads=False):
        for row in range(batch.num_rows):
            done += 1
            try:
                record = {name: batch.column(name)[row].as_py() for name in columns}
                yield from form.chunks(record, span.cost * done // total)
            except (SpecError, UnicodeDecodeError) as error:
                problem = "is not UTF-8: repair it or take it out" if isinstance(error, UnicodeDecodeError) else error
                raise SpecError(f"{span.file}, row {before + done} {problem}") from None


def _opened(path: Path, form: RecordFormat) -> tuple[Any, list[str]]:
    """A parquet file, and its columns that are read."""
    try:
        import pyarrow
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise SpecError(
            f"{path} needs the pyarrow package, which is not installed: try pip install 'ultrascale[data]'"
        ) from None
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise SpecError(f"{path} is no parquet file ({str(error).splitlines()[0][:100]}): repair it or take it out") from None
    return file, form.columns(path, file.schema_arrow)
