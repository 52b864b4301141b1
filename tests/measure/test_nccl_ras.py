"""Output of ncclras, in the formats of NCCL 2.28: ranks that are missing, late, or in error are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ultrascale.measure import nccl_ras
from ultrascale.measure.flight_recorder import DumpAnalysis

Run = Callable[..., tuple[int, str, str]]
HEAD = """NCCL version 2.28.9 compiled with CUDA 13.0
CUDA runtime version 13000, driver version 13000

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          4            1          8        8

Communicators... (0.000s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         4         8         8   RUNNING  {}
    1         4         1         2         2         8   RUNNING      OK

Errors
======

{}
Warnings
========

{}
"""
INCOMPLETE = """INCOMPLETE
  Missing communicator data from 1 job process
  Process 3004 on node 10.0.0.2 managing GPU 1

#0-0 (a476b764956fcd49) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 5 -- GPU 1 managed by process 3004 on node 10.0.0.2

#0-0 (a476b764956fcd49) ERROR
  Asynchronous errors on 2 ranks
  2 ranks reported Remote process error
  Rank 0 -- GPU 0 managed by process 3000 on node 10.0.0.1
  Rank 1 -- GPU 1 managed by process 3001 on node 10.0.0.1

"""
MISMATCH = """#0-0 (a476b764956fcd49) MISMATCH
  Communicator ranks have different status
  7 ranks have status RUNNING
  Rank 2 has status ABORT -- GPU 2 (NVML 6) managed by process 3002 on node 10.0.0.1
  Communicator ranks have different AllReduce operation counts
  6 ranks have launched up to operation 6650
  Rank 3 has launched up to operation 6649 -- GPU 3 managed by process 3003 on node 10.0.0.1
  Rank 7 has not launched any operations -- GPU 3 managed by process 3007 on node 10.0.0.2

"""
NAME = "communicator a476b764956fcd49 of 8 ranks"


def rank(number: int, state: str = "", error: int = 0, **counts: int) -> dict[str, Any]:
    status = {"init_state": 0, "async_error": error, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    status |= {state: True} if state else {}
    place = {"rank": number, "host": f"10.0.0.{1 + number // 4}", "pid": 3000 + number, "cuda_dev": number % 4, "nvml_dev": 0}
    return {**place, "status": status, "collective_counts": {"Broadcast": 4, "AllReduce": 6650, **counts}}


def dumped(ranks: list[dict[str, Any]], missing: dict[int, tuple[bool, bool]]) -> dict[str, Any]:
    absent = []
    for number, (unresponsive, dead) in missing.items():
        absent.append({**rank(number), "status": {"unresponsive": unresponsive, "considered_dead": dead}})
        absent[-1].pop("collective_counts")
    communicator = {
        "hash": "0xa476b764956fcd49", "secondary_hash": "0x1:0x2", "size": 8, "ranks_count": len(ranks),
        "missing_ranks_count": len(absent), "ranks": ranks, "missing_ranks": absent,
    }  # fmt: skip
    head = {"nccl_version": "2.28.9", "cuda_runtime_version": 13000, "communicators_count": 1}
    return {**head, "communicators": [communicator], "ras": {"collection_time_sec": 0.0, "timeouts_count": 0}}


def read(path: Path, content: str | dict[str, Any]) -> DumpAnalysis:
    path.write_text(content if isinstance(content, str) else json.dumps(content, indent=2))
    found = nccl_ras.read(path)
    assert found is not None
    return found


def test_missing_ranks_and_errors_are_named(tmp_path: Path) -> None:
    found = read(tmp_path / "ras.txt", HEAD.format("INCOMPLETE,ERROR", INCOMPLETE, ""))
    assert [one.sentence for one in found.problems] == [
        f"rank 5 of {NAME} is missing: no answer (GPU 1 of process 3004 on 10.0.0.2)",
        f"ranks 0, 1 of {NAME} report: Remote process error "
        "(GPU 0 of process 3000 on 10.0.0.1; GPU 1 of process 3001 on 10.0.0.1)",
    ]
    assert [one.culprits for one in found.problems] == [(5,), (0, 1)]
    assert found.notes == ("process 3004 on node 10.0.0.2 (GPU 1) does not answer",)
    assert (found.groups, found.nccl) == (5, "2.28.9")
    ranks = [rank(number, error=6 * (number < 2)) for number in range(5)]
    found = read(tmp_path / "ras.json", dumped(ranks, {5: (True, True), 6: (False, False), 7: (False, False)}))
    assert [one.sentence.split(" (")[0] for one in found.problems] == [
        f"rank 5 of {NAME} is missing: no answer, considered dead",
        f"ranks 6, 7 of {NAME} are missing: an answer without this communicator",
        f"ranks 0, 1 of {NAME} report: Remote process error",
    ]


def test_late_ranks_and_those_in_another_state_are_named(tmp_path: Path) -> None:
    text = read(tmp_path / "ras.txt", HEAD.format("MISMATCH", "", MISMATCH))
    assert [one.sentence for one in text.problems] == [
        f"rank 2 of {NAME} is aborting and 7 ranks are running (GPU 2 (NVML 6) of process 3002 on 10.0.0.1)",
        f"rank 7 of {NAME} has launched 0 AllReduce and 6 ranks 6,650: it is late by 6,650 (GPU 3 of process 3007 on 10.0.0.2)",
        f"rank 3 of {NAME} has launched 6,649 AllReduce and 6 ranks 6,650: it is late by 1 (GPU 3 of process 3003 on 10.0.0.1)",
    ]
    assert "counts are of one moment" in text.notes[0]
    counts = {3: 6649, 7: 0}
    ranks = [rank(number, "abort_flag" * (number == 2), AllReduce=counts.get(number, 6650)) for number in range(8)]
    data = read(tmp_path / "ras.json", dumped(ranks, {}))
    for one, other in zip(text.problems, data.problems, strict=True):
        assert (one.culprits, one.what, one.kind, one.sequence) == (other.culprits, other.what, other.kind, other.sequence)
    assert f"ranks 3, 7 of {NAME} have launched 0" in read(
        tmp_path / "ras.json", dumped([rank(number, AllReduce=6 * (number not in (3, 7))) for number in range(8)], {})
    ).problems[0].sentence  # fmt: skip


def test_the_format_of_nccl_2_24_and_ranks_that_are_too_many_to_be_named(tmp_path: Path) -> None:
    older = MISMATCH.replace("different AllReduce operation", "different collective operation").split("  Rank 3")[0]
    found = read(tmp_path / "ras.txt", HEAD.format("MISMATCH", "", older + "  2 ranks have launched up to operation 6\n"))
    assert (
        found.problems[-1].sentence == f"2 ranks of {NAME} have launched 6 collective and 6 ranks 6,650: they are late by 6,644"
    )
    assert found.problems[-1].culprits == ()


def test_the_command_tells_dumps_from_ras(run: Run, tmp_path: Path) -> None:
    fine, late = tmp_path / "ras.txt", tmp_path / "late.json"
    fine.write_text(HEAD.format("OK", "", ""))
    code, printed, err = run("profile", "--flight-recorder", fine)
    assert code == 0, err
    assert "NCCL 2.28.9: 5 communicators: no rank is missing, late or in error" in printed
    late.write_text("SERVER PROTOCOL 2\nOK\n" + json.dumps(dumped([rank(0, AllReduce=3), rank(1)], {})))
    code, printed, _ = run("profile", "--flight-recorder", late, "--json", tmp_path / "out.json")
    assert (code, "Rank 0 of communicator" in printed) == (1, True)
    assert json.loads((tmp_path / "out.json").read_text())["problems"][0]["culprits"] == [0]
    text = fine.read_text()
    for content, why in (
        (text[: text.index("Warnings")], "cut off or changed"),
        (json.dumps(dumped([], {}), indent=2)[:200], "cut off or changed"),
        ('{"nccl_version": "2", "communicators": [{"hash": 1}]}', "cut off or changed"),
        ('{"nccl_version": "2", "communicators": ' + "[" * 100_000, "cut off or changed"),
        ("NCCL INFO something else", "is no dump, or is cut off"),
    ):
        late.write_text(content)
        code, _, err = run("profile", "--flight-recorder", late)
        assert (code, why in " ".join(err.split()), "Traceback" in err) == (2, True, False), err
    (tmp_path / "folder").mkdir()
    fine.rename(tmp_path / "folder" / "rank0.txt")
    code, _, err = run("profile", "--flight-recorder", tmp_path / "folder")
    assert (code, "is output of ncclras" in " ".join(err.split())) == (2, True)


@pytest.mark.parametrize("field", ["rank", "pid", "status", "collective_counts"])
def test_values_of_another_type_are_refused(run: Run, tmp_path: Path, field: str) -> None:
    path = tmp_path / "ras.json"
    path.write_text(json.dumps(dumped([{**rank(0), field: ["x"]}], {})))
    code, _, err = run("profile", "--flight-recorder", path)
    assert (code, "Traceback" in err) == (2, False), err
