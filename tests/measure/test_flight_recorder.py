"""Dumps of torch's flight recorder: who did not join, who joined another collective; pickles are read without running them."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ultrascale.measure import flight_recorder
from ultrascale.measure.flight_recorder import DumpAnalysis
from ultrascale.specs.errors import SpecError

Run = Callable[..., tuple[int, str, str]]
RANKS = range(4)


def entry(
    sequence: int, kind: str = "all_reduce", size: int = 8, group: tuple[str, str] = ("0", "default_pg")
) -> dict[str, Any]:
    """As torch 2.13 writes it, less the times."""
    return {
        "frames": [
            {"name": "all_reduce", "filename": "/x/torch/distributed/distributed_c10d.py", "line": 3245},
            {"name": "step", "filename": "/home/me/train.py", "line": 17},
        ],
        "record_id": sequence - 1,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "profiling_name": f"nccl:{kind}",
        "input_sizes": [[size]],
        "input_dtypes": ["Float"],
        "output_sizes": [[size]],
        "output_dtypes": ["Float"],
        "state": "completed",
        "is_p2p": False,
    }


def dump(entries: list[dict[str, Any]]) -> dict[str, Any]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}


def analysed(folder: Path, of: dict[int, list[dict[str, Any]]], form: str = "pickle") -> DumpAnalysis:
    for rank, entries in of.items():
        data = dump(entries)
        if form == "pickle":
            (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(data, protocol=2))
        else:
            (folder / f"rank_{rank}.json").write_text(json.dumps(data))
    return flight_recorder.analyse(*flight_recorder.read([folder]))


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_the_rank_that_did_not_join_is_named(tmp_path: Path, form: str) -> None:
    everything = {rank: [entry(1), entry(2), *([entry(3)] if rank != 1 else [])] for rank in RANKS}
    (problem,) = analysed(tmp_path, everything, form).problems
    assert (problem.culprits, problem.sequence, problem.kind, problem.what) == ((1,), 3, "all_reduce", "missing")
    assert problem.sentence == (
        "rank 1 did not join all_reduce 3 ([8] Float, called at train.py:17 (step)) of group default_pg (0) of 4 ranks, in "
        "which ranks 0, 2, 3 wait: the last that rank 1 started is all_reduce 2 of default_pg, called at train.py:17 (step)"
    )


def test_ranks_that_joined_the_same_have_no_problem(tmp_path: Path) -> None:
    found = analysed(tmp_path, {rank: [entry(1), entry(2)] for rank in RANKS})
    assert (found.problems, found.notes, found.collectives) == ((), (), 2)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (entry(2, "broadcast"), "rank 3 has broadcast and ranks 0, 1, 2 have all_reduce in collective 2 (all_reduce)"),
        (entry(2, size=16), "rank 3 has [16] Float and ranks 0, 1, 2 have [8] Float in collective 2 (all_reduce)"),
    ],
)
def test_different_kinds_or_sizes_are_named(tmp_path: Path, wrong: dict[str, Any], words: str) -> None:
    (problem,) = analysed(tmp_path, {rank: [entry(1), wrong if rank == 3 else entry(2)] for rank in RANKS}).problems
    assert (problem.what, problem.culprits) == ("mismatch", (3,))
    assert problem.sentence.startswith(words)


def test_sizes_of_an_all_to_all_may_differ(tmp_path: Path) -> None:
    assert not analysed(tmp_path, {rank: [entry(1, "all_to_all", size=rank + 1)] for rank in RANKS}).problems


def test_a_message_that_was_not_sent_is_named(tmp_path: Path) -> None:
    def message(name: str) -> dict[str, Any]:
        return {**entry(0), "record_id": 0, "profiling_name": name, "is_p2p": True}

    sent = [message("nccl:send 0->1")]
    asked = [message("nccl:recv 1<-0"), message("nccl:recv 1<-0")]
    (problem,) = analysed(tmp_path, {0: sent, 1: asked}).problems
    assert problem.sentence.startswith(
        "rank 0 sent 1 messages to rank 1 in group 0, which asked for 2: rank 0 did not send number 2"
    )


def test_missing_and_broken_dumps_are_noted(tmp_path: Path) -> None:
    (tmp_path / "nccl_trace_rank_2").write_bytes(b"")
    found = analysed(tmp_path, {rank: [entry(1)] for rank in (0, 1)})
    assert "nccl_trace_rank_2 is no dump, or is cut off" in found.notes[0]
    assert found.notes[1].startswith("ranks 2, 3 have no dump here")


def test_a_transfer_that_hangs_is_noted(tmp_path: Path) -> None:
    hung = {rank: [{**entry(1), "state": "started" if rank == 2 else "completed"}] for rank in RANKS}
    assert "has not ended on rank 2" in analysed(tmp_path, hung).notes[0]


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("evil",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Evil()),
        pickle.dumps({"entries": [Evil()]}),
        b"\x80\x02c__builtin__\neval\n(S'1'\ntR.",
        b"\x80\x02r\xff\xff\xff\x7f.",
        b"\x80\x04\x96\xff\xff\xff\xff\xff\xff\xff\x00.",
        b"{]",
        b"[" * 100_000,
        pickle.dumps([1, 2]),
        pickle.dumps({"entries": 3}),
        pickle.dumps({"entries": [3]}),
    ],
)
def test_a_pickle_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rank_0").write_bytes(data)
    with pytest.raises(SpecError, match=r"--flight-recorder .*rank_0"):
        flight_recorder.read([tmp_path / "rank_0"])
    assert os.listdir(tmp_path) == ["rank_0"]


def test_the_command_answers_with_its_exit_code(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir()
    analysed(folder, {rank: [entry(1), *([entry(2)] if rank else [])] for rank in RANKS})
    code, printed, _ = run("profile", "--flight-recorder", folder, "--json", tmp_path / "out.json")
    assert (code, "Rank 0 did not join all_reduce 2" in printed) == (1, True)
    assert json.loads((tmp_path / "out.json").read_text())["problems"][0]["culprits"] == [0]
    analysed(folder, {0: [entry(1), entry(2)]})
    code, printed, _ = run("profile", "--flight-recorder", folder)
    assert (code, printed.strip()) == (0, "4 dumps: 2 collectives of 1 group: all ranks joined the same ones")
    for given, why in ((tmp_path / "none", "does not exist"), (tmp_path / "out.json", "does not end in its rank")):
        code, _, err = run("profile", "--flight-recorder", given)
        assert (code, why in err) == (2, True), err
    (tmp_path / "rank0").write_bytes((folder / "nccl_trace_rank_0").read_bytes())
    code, _, err = run("profile", "--flight-recorder", folder, "--flight-recorder", tmp_path / "rank0")
    assert (code, "rank 0 is in" in err) == (2, True)
    code, _, err = run("profile", "--flight-recorder", folder, "--trace", folder)
    assert (code, "reads dumps alone" in err) == (2, True)
