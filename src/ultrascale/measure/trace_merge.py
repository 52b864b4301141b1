"""One trace file of all ranks for Perfetto: aligned clocks, a process for each rank, written event by event."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ultrascale.measure.trace_analysis import MERGED
from ultrascale.measure.trace_clocks import Clock
from ultrascale.measure.trace_rank import MERGED_KEY
from ultrascale.measure.trace_summary import RankSummary
from ultrascale.specs.errors import SpecError, os_reason


def write_merged(path: Path, ranks: Sequence[RankSummary], clocks: Sequence[Clock]) -> list[str]:
    """Write the whole file or none; the notes say what was left out."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        with os.fdopen(handle, "wb") as raw, gzip.open(raw, "wt", compresslevel=4, encoding="utf-8") as file:
            for text in _text(ranks, clocks):
                file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise SpecError(f"{path} cannot be written ({os_reason(error)}): name another file, such as merged{MERGED}") from None
    finally:
        if temporary is not None:
            os.unlink(temporary)
    return list(_notes(ranks))


def _notes(ranks: Sequence[RankSummary]) -> Iterator[str]:
    left_out, kept = sum(one.timeline.left_out for one in ranks), sum(len(one.timeline.start) for one in ranks)
    if left_out:
        yield f"the merged trace has the {kept:,} longest events, and {left_out:,} shorter ones are left out"
    if any(one.times.device == "cpu" for one in ranks):
        yield "the merged trace shows operators of a CPU joined, without their names: open a rank's own trace for these"


def _text(ranks: Sequence[RankSummary], clocks: Sequence[Clock]) -> Iterator[str]:
    """JSON in pieces, a rank's events each. Microseconds with three digits: nanoseconds."""
    yield '{"schemaVersion": 1, "displayTimeUnit": "ms", "' + MERGED_KEY + '": true, "traceEvents": [\n'
    for place, (one, clock) in enumerate(zip(ranks, clocks, strict=True)):
        events, rank = one.timeline, one.rank
        lines = [_metadata("process_name", rank, 0, name=f"rank {rank}{f' on {one.host}' if one.host else ''}")]
        lines.append(_metadata("process_sort_index", rank, 0, sort_index=rank))
        lines += [_metadata("thread_name", rank, lane, name=name) for lane, name in enumerate(events.lanes)]
        names = [json.dumps(name) for name in events.names]
        starts, durations = clock.aligned(events.start).tolist(), (clock.rate * events.duration).tolist()
        lines += [
            f'{{"ph":"X","pid":{rank},"tid":{lane},"ts":{start:.3f},"dur":{duration:.3f},"name":{names[name]}}}'
            for start, duration, name, lane in zip(starts, durations, events.name.tolist(), events.lane.tolist(), strict=True)
        ]
        yield ("" if place == 0 else ",\n") + ",\n".join(lines)
    yield "\n]}\n"


def _metadata(what: str, rank: int, lane: int, **values: str | int) -> str:
    return json.dumps({"ph": "M", "name": what, "pid": rank, "tid": lane, "args": values})
