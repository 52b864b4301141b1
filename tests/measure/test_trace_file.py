"""Trace files as they come: large, compressed, cut off, empty, or no traces at all."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from trace_builders import Device, op, step, write

from ultrascale.measure import trace_file, trace_times
from ultrascale.measure import trace_rank as trace
from ultrascale.measure.trace_analysis import analyse, files
from ultrascale.measure.trace_file import TraceFile
from ultrascale.specs.errors import SpecError

Run = Callable[..., tuple[int, str, str]]


def kernels(count: int) -> list[dict[str, object]]:
    gpu = Device()
    for place in range(count):
        gpu.kernel(1000 + 10 * place, 1005 + 10 * place, launched=10 * place)
    return gpu.events


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
@pytest.mark.parametrize("chunk", [1, 7, 64, 2**20])
def test_every_event_is_read_at_any_chunk_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, chunk: int) -> None:
    monkeypatch.setattr(trace_file, "CHUNK", chunk)
    events = [*kernels(5), {**op('odd "name" } ] \\ \u00e9', 0, 1), "args": {"deep": [[{"}": "]"}], -1.5e3, None, True]}}]
    file = TraceFile(write(tmp_path / name, events, rank=3, deviceProperties=[{"id": 0}], baseTimeNanoseconds=1790857026))
    assert [one for block in file.blocks() for one in block][1:] == events
    assert file.broken is None
    assert file.facts["distributedInfo"]["rank"] == 3
    assert file.facts["traceName"] == name
    assert file.facts["baseTimeNanoseconds"] == 1790857026, "a number that is cut goes on"


@pytest.mark.parametrize("spaces", [0, 1, 2, 3])
def test_an_event_that_ends_with_its_chunk_is_followed_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spaces: int
) -> None:
    """At every chunk size one chunk ends between an event and its comma."""
    events = [{"ph": "X", "name": str(place)} for place in range(40)]
    path = tmp_path / "trace.json"
    path.write_text(f"[{(',' + ' ' * spaces).join(map(json.dumps, events))}]")
    for chunk in range(1, 80):
        monkeypatch.setattr(trace_file, "CHUNK", chunk)
        assert [one for block in TraceFile(path).blocks() for one in block] == events


@pytest.mark.parametrize("odd", ["}, {", "\\ud800", '"', "1" + 30 * "0", "NaN"])
def test_blocks_that_the_fast_parser_refuses_are_read_event_by_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: str
) -> None:
    """A boundary inside an event or a text, a lone surrogate, and a long integer."""
    value = odd if odd[0] in "1N" else json.dumps(odd).replace("\\\\ud", "\\ud")
    each = '{"ph": "X", "name": %d, "args": {"deep": [{"a": 1}, {"b": %s}]}}'
    text = "[" + ", ".join(each % (place, value) for place in range(200)) + "]"
    path = tmp_path / "trace.json"
    path.write_text(text)
    expected = json.dumps(json.loads(text))
    for chunk in (50, 71, 5000):
        monkeypatch.setattr(trace_file, "CHUNK", chunk)
        file = TraceFile(path)
        assert json.dumps([one for block in file.blocks() for one in block]) == expected
        assert file.broken is None


def test_a_list_of_events_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "rank_12.json"
    path.write_text(json.dumps(kernels(2)))
    assert trace.read(path).rank == 12


@pytest.mark.parametrize("squeezed", [False, True])
def test_a_truncated_trace_is_read_up_to_its_last_event(tmp_path: Path, run: Run, squeezed: bool) -> None:
    whole = write(tmp_path / ("whole.json.gz" if squeezed else "whole.json"), [step(4, 0, 4000), *kernels(400)])
    cut = tmp_path / ("cut.json.gz" if squeezed else "cut.json")
    data = whole.read_bytes()
    cut.write_bytes(data[: len(data) // 2])
    before, after = (trace.read(path) for path in (whole, cut))
    assert before.broken is None
    assert after.broken is not None
    assert 0 < after.events < before.events
    code, printed, err = run("profile", "--trace", cut)
    assert code == 0, err
    assert "was cut off" in printed
    assert f"{after.events:,} events" in printed


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"schemaVersion": 1, "traceEvents": []}', "has no events that last"),
        (
            '{"schemaVersion": 1, "traceEvents": [{"ph": "X", "cat": "ker',
            "has no events that last, and what begins at character 37 is not whole",
        ),
        ('{"model": "tiny", "layers": 3}', "is no trace (it has no traceEvents)"),
        ("[1, 2, 3]", "has no events that last"),
        ("step,loss\n1,2.0\n", "is no trace (it does not begin like JSON)"),
        ("", "has no events that last, and it ends after 0 characters"),
        ('{"traceEvents": [{"ph": "X"}, oh]}', "has no events that last, and what begins at character 30 is not whole"),
        ('{"traceEvents": [{"ph": "X", "name": "a", "ts": "now", "dur": 1}]}', "ts of the event 'a' is 'now' but must be"),
        ('{"traceEvents": [{"ph": "X", "name": "a", "ts": NaN, "dur": 1}]}', "ts of the event 'a' is nan but must be a number"),
        ('{"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": NaN}]}', "dur of the event 'a' is nan but must be"),
        ('{"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": Infinity}]}', "dur of the event 'a' is inf but"),
        ('{"traceEvents": [{"ph": "X", "name": "a", "ts": 1e999, "dur": 1}]}', "ts of the event 'a' is inf but"),
        ('{"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": -1}]}', "dur of the event 'a' is -1 but"),
        ('{"traceEvents": [{"ph": "X", "name": "a", "ts": true, "dur": 1}]}', "ts of the event 'a' is true but"),
        ('{"traceEvents": [{"ph": "X", "name": "a\\u001b[2J", "ts": 1, "dur": "1"}]}', "event 'a\\x1b[2J' is '1' but"),
        ("[" * 100_000, "has no events that last"),
    ],
)
def test_non_traces_are_refused(tmp_path: Path, run: Run, text: str, why: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    code, _, err = run("profile", "--trace", path)
    assert code == 2
    assert why in err
    assert "Traceback" not in err


def test_missing_files_are_refused(tmp_path: Path, run: Run) -> None:
    code, _, err = run("profile", "--trace", tmp_path / "none.json")
    assert (code, "does not exist" in err) == (2, True)
    code, _, err = run("profile", "--trace", tmp_path)
    assert (code, "folder without traces" in err) == (2, True)
    (tmp_path / "bad.json.gz").write_bytes(b"\x1f\x8b" + b"no gzip at all")
    code, _, err = run("profile", "--trace", tmp_path / "bad.json.gz")
    assert (code, "has no events" in err) == (2, True)


def test_a_run_and_traces_are_mutually_exclusive(run: Run, tmp_path: Path) -> None:
    for words, why in (
        ((), "takes a plan to run, or --trace"),
        (("plan.yaml", "--trace", tmp_path), "takes a plan to run, or --trace"),
        (("plan.yaml", "--plan", "plan.yaml"), "--plan goes with --trace"),
        (("layout.tp=2",), "none is named"),
        (("plan.yaml", "train.steps=9"), "train.steps is what --steps says"),
    ):
        code, _, err = run("profile", *words)
        assert (code, why in err) == (2, True), err


def test_several_packed_parts_are_one_trace(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": kernels(4)}).encode()
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(text[:300]) + gzip.compress(text[300:]))
    found = trace.read(path)
    assert (found.events, found.broken) == (8, None)


def test_folders_expand_to_their_traces(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "traces"
    folder.mkdir(parents=True)
    written = [write(folder / f"rank{rank}.json.gz", kernels(2), rank=rank) for rank in (0, 1)]
    (tmp_path / "run" / "env.json").write_text("{}")
    assert files([tmp_path / "run"]) == files([folder]) == written
    with gzip.open(written[0], "rt") as file:
        assert json.load(file)["distributedInfo"]["rank"] == 0


def test_a_trace_without_step_marks_is_noted(tmp_path: Path) -> None:
    found = analyse([trace_times.analyse(trace.read(write(tmp_path / "trace.json", kernels(3))))])
    assert "marks no steps" in found.notes[0]


def test_empty_steps_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.json", [step(1, 5000, 6000), *kernels(3)])
    with pytest.raises(SpecError, match="marks steps in which nothing ran"):
        trace_times.analyse(trace.read(path))


def test_reading_and_analysing_need_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    path = write(tmp_path / "trace.json", kernels(3))
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"sys.argv = ['ultrascale', 'profile', '--trace', {str(path)!r}]\n"
        "from ultrascale.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "one step of each rank" in done.stdout


def test_a_gzip_file_that_grows_a_thousandfold_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    """300 MiB of spaces, which are 0.3 MiB packed: no more than the bound and one chunk is unpacked."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    spaces = [packer.compress(b" " * 2**20) for _ in range(300)]
    packed = b"".join([*spaces, packer.flush()])
    path = tmp_path / "trace.json.gz"
    path.write_bytes(packed)
    assert len(packed) < 2**20
    unpacked = []
    with pytest.raises(SpecError, match=r"unpacks to more than 67,108,864 bytes, 200 times its size"):
        unpacked.extend(len(piece) for piece in trace_file._pieces(path))
    assert max(unpacked) <= trace_file.CHUNK
    assert sum(unpacked) <= trace_file.MAX_UNPACKED_FREE


def test_a_fifo_is_no_trace(tmp_path: Path, run: Run) -> None:
    os.mkfifo(tmp_path / "trace.json")
    code, _, err = run("profile", "--trace", tmp_path / "trace.json")
    assert (code, "not a regular file" in err) == (2, True)
