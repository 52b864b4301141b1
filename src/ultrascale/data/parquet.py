"""Reads documents from the rows of parquet files, by row groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ultrascale.data.input_parts import DocumentChunk, InputSpan, checked, pieces
from ultrascale.specs.errors import SpecError
from ultrascale.specs.validate import shown

_ROWS = 64  # rows converted to Python strings at a time


def cut(path: Path, field: str, size: int, digest: str, length: int) -> Iterator[InputSpan]:
    groups = _opened(path, field).metadata
    start = group_bytes = 0
    for group in range(groups.num_row_groups):
        group_bytes += groups.row_group(group).total_byte_size
        if group_bytes >= length or group + 1 == groups.num_row_groups:
            share = size * (group + 1) // groups.num_row_groups - size * start // groups.num_row_groups
            yield InputSpan(str(path), size, digest, start, group + 1, share)
            start, group_bytes = group + 1, 0


def read(span: InputSpan, field: str) -> Iterator[DocumentChunk]:
    import pyarrow  # type: ignore[import-untyped]

    try:
        yield from _rows(span, field)
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0][:100]
        raise SpecError(f"{span.file} cannot be read ({reason}): repair it or take it out") from None


def _rows(span: InputSpan, field: str) -> Iterator[DocumentChunk]:
    file = _opened(Path(span.file), field)
    counts = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
    before, total, done = sum(counts[: span.start]), sum(counts[span.start : span.stop]), 0
    for batch in file.iter_batches(_ROWS, row_groups=list(range(span.start, span.stop)), columns=[field], use_threads=False):
        for value in batch.column(0):
            done += 1
            try:
                text = checked(value.as_py(), field)
            except (SpecError, UnicodeDecodeError) as error:
                problem = "is not UTF-8: repair it or take it out" if isinstance(error, UnicodeDecodeError) else error
                raise SpecError(f"{span.file}, row {before + done} {problem}") from None
            yield from pieces(text, span.cost * done // total)


def _opened(path: Path, field: str) -> Any:
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
    schema = file.schema_arrow
    if field not in schema.names:
        raise SpecError(
            f"{path} has no column {shown(field)} (it has: {', '.join(schema.names[:8])}): name the text's with --field"
        )
    kind = schema.field(field).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise SpecError(f"{path} holds {kind} in its column {shown(field)} but must hold text: name another with --field")
    return file
