"""Read what NCCL's RAS subsystem tells of a running job (`ncclras`, text or JSON): missing ranks, late ranks, and errors.

The text is that of NCCL 2.24 to 2.29, in which only ranks that differ from the most are named; JSON came with 2.28 and names
all. Counts of collectives are of one moment: in a job that is well they may differ too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ultrascale.measure.flight_recorder import MAX_DUMP_BYTES, DumpAnalysis, Problem, is_ras
from ultrascale.measure.trace_rank import rank_list
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import read_bytes, reason_of

IN_PROGRESS = 7
_ERRORS = {1: "Unhandled CUDA error", 2: "System error", 3: "Internal error", 4: "Invalid argument", 5: "Invalid usage"}
_ERRORS |= {6: "Remote process error"}
"""ncclResult_t, in the words of the text"""
_STATES = {"INIT": "initializing", "RUNNING": "running", "FINALIZE": "finalizing", "ABORT": "aborting"}
_ANSWERS = re.compile(r"\A(?:(?:SERVER PROTOCOL \d+|OK)\s*\n)+")  # to a client that is no ncclras
_GROUP = re.compile(r" *(\d{1,9}) +(\d{1,9}) +\d+ +[\d-]+ +(\d{1,9}) +\d+ +[A-Z]+ +[A-Z,]+")
_COMMUNICATOR = re.compile(r"#(\d{1,9})-\d+ \(([0-9a-f]{1,16})\) (?:INCOMPLETE|ERROR|MISMATCH)")
_COUNTS = re.compile(r"  Communicator ranks have different (\w+) operation counts")
_PROCESS = re.compile(r"  (Process \d+ on node \S+) managing GPUs? (.{1,200})")
_MISSING = re.compile(r"  Missing communicator data from (\d{1,9}) ranks?")
_RANKS = re.compile(
    r"  (?:(?P<number>\d{1,9}) ranks|Rank (?P<rank>\d{1,9}))(?: (?:has|have) status (?P<state>[A-Z]+)"
    r"| (?:has|have) launched up to operation (?P<count>\d{1,18})| (?P<none>(?:has|have) not launched any operations)"
    r"| reported (?P<error>[^-]{1,80}?))?(?: -- (?P<where>.{1,300}))?"
)


@dataclass
class _RankSet:
    """Of a communicator, alike in something; a text names them only where they are few."""

    number: int = 0
    named: list[int] = field(default_factory=list)
    where: list[str] = field(default_factory=list)

    def add(self, rank: int, where: str) -> None:
        self.named.append(rank)
        self.where.append(where)
        self.number = max(self.number, len(self.named))

    def __str__(self) -> str:
        return rank_list(self.named) if self.named else f"{self.number:,} ranks"

    @property
    def places(self) -> str:
        few = "; ".join(self.where[:3])
        return f" ({few}{f'; and {len(self.where) - 3:,} more' if len(self.where) > 3 else ''})" if few else ""


@dataclass
class _Communicator:
    name: str
    size: int
    missing: dict[str, _RankSet] = field(default_factory=dict)
    """by reason"""
    states: dict[str, _RankSet] = field(default_factory=dict)
    counts: dict[str, dict[int, _RankSet]] = field(default_factory=dict)
    """of collectives that were launched, by kind"""
    errors: dict[str, _RankSet] = field(default_factory=dict)


SILENT, DEAD, WITHOUT = "no answer", "no answer, considered dead", "an answer without this communicator"


def read(path: Path) -> DumpAnalysis | None:
    """None where the file is no output of RAS. SpecError where it is cut off."""
    try:
        raw = read_bytes(path, MAX_DUMP_BYTES)
    except OSError as error:
        raise SpecError(f"--flight-recorder {path} {reason_of(error)}: give dumps, or the output of ncclras") from None
    if not is_ras(raw):
        return None
    text = _ANSWERS.sub("", raw.decode("utf-8", "replace").lstrip())
    broken = SpecError(f"--flight-recorder {path} is output of ncclras, cut off or changed: run `ncclras -v > ras.txt` again")
    if text.startswith("{"):
        try:
            data = json.loads(text)
            found, number = [_of_json(one) for one in data["communicators"]], len(data["communicators"])
            version, notes = str(data["nccl_version"])[:40], list[str]()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise broken from None
    else:
        if not re.search(r"^Warnings\n=+$", text, re.MULTILINE) and "No communicator data collected!" not in text:
            raise broken
        found, number, notes = _of_text(text)
        version = text.split()[2]
    problems = [problem for one in found for problem in _problems(one)]
    if any(one.what == "late" for one in problems):
        notes.append("counts are of one moment: ask again after some seconds, since in a job that hangs they stay the same")
    largest = max((one.size for one in found), default=0)
    return DumpAnalysis(largest, 0, number, tuple(problems), tuple(notes), version)


def _of_json(data: dict[str, Any]) -> _Communicator:
    found = _Communicator(str(data["hash"])[:20].removeprefix("0x"), int(data["size"]))
    for one in data["ranks"]:
        rank, where, status = int(one["rank"]), _where(one), one["status"]
        state = "RUNNING" if status["init_state"] == 0 else "INIT"
        if status["abort_flag"]:
            state = "ABORT"
        elif status["finalize_called"] or status["destroy_flag"]:
            state = "FINALIZE"
        found.states.setdefault(state, _RankSet()).add(rank, where)
        for error in {status["init_state"], status["async_error"]} - {0, IN_PROGRESS}:
            found.errors.setdefault(_ERRORS.get(error, f"error {int(error)}"), _RankSet()).add(rank, where)
        for kind, count in one["collective_counts"].items():
            found.counts.setdefault(str(kind)[:40], {}).setdefault(int(count), _RankSet()).add(rank, where)
    for one in data["missing_ranks"]:
        status = one["status"]
        why = DEAD if status["considered_dead"] else SILENT if status["unresponsive"] else WITHOUT
        found.missing.setdefault(why, _RankSet()).add(int(one["rank"]), _where(one))
    return found


def _where(one: dict[str, Any]) -> str:
    return f"GPU {int(one['cuda_dev'])} of process {int(one['pid'])} on {str(one['host'])[:80]}"


def _of_text(text: str) -> tuple[list[_Communicator], int, list[str]]:
    """Communicators with a problem, the number of all, and notes on processes."""
    sizes: dict[str, int] = {}
    found: dict[str, _Communicator] = {}
    notes, total, kind = [], 0, "collective"
    current, ranks = _Communicator("", 0), _RankSet()  # before the first
    for line in text.splitlines():
        if (group := _GROUP.fullmatch(line)) is not None:
            sizes[group[1]], total = int(group[3]), total + int(group[2])
        elif (named := _COMMUNICATOR.fullmatch(line)) is not None:
            current = found.setdefault(named[2], _Communicator(named[2], sizes.get(named[1], 0)))
        elif (process := _PROCESS.fullmatch(line)) is not None:
            notes.append(f"{process[1].replace('Process', 'process')} (GPU {process[2]}) does not answer")
        elif (missing := _MISSING.fullmatch(line)) is not None:
            ranks = current.missing.setdefault(SILENT, _RankSet(int(missing[1])))
        elif (counts := _COUNTS.fullmatch(line)) is not None:
            kind = counts[1]
        elif (one := _RANKS.fullmatch(line)) is not None:
            if one["state"] == "NOCOMM":
                ranks = current.missing.setdefault(WITHOUT, _RankSet())
            elif one["state"]:
                ranks = current.states.setdefault(one["state"], _RankSet())
            elif one["count"] or one["none"]:
                ranks = current.counts.setdefault(kind, {}).setdefault(int(one["count"] or 0), _RankSet())
            elif one["error"]:
                ranks = current.errors.setdefault(one["error"], _RankSet())
            if one["number"]:
                ranks.number = int(one["number"])
            else:
                where = str(one["where"] or "").replace(" managed by process", " of process").replace(" on node ", " on ")
                ranks.add(int(one["rank"]), where)
    return list(found.values()), total, list(dict.fromkeys(notes))


def _problems(one: _Communicator) -> Iterator[Problem]:
    of = f"communicator {one.name}" + (f" of {one.size:,} ranks" if one.size else "")

    def problem(what: str, kind: str, ranks: _RankSet, sentence: str, sequence: int = 0) -> Problem:
        return Problem(one.name, one.size, sequence, kind, what, tuple(ranks.named), f"{sentence}{ranks.places}")

    for why, ranks in one.missing.items():
        yield problem("missing", "communicator", ranks, f"{ranks} of {of} {_verb(ranks, 'is', 'are')} missing: {why}")
    for error, ranks in one.errors.items():
        yield problem("error", "communicator", ranks, f"{ranks} of {of} {_verb(ranks, 'reports', 'report')}: {error}")
    most = max(one.states, key=lambda state: one.states[state].number, default="")
    for state, ranks in one.states.items():
        if state != most:
            yield problem(
                "mismatch", "communicator", ranks,
                f"{ranks} of {of} {_verb(ranks, 'is', 'are')} {_STATES.get(state, state)} and {one.states[most]} "
                f"{_verb(one.states[most], 'is', 'are')} {_STATES.get(most, most)}",
            )  # fmt: skip
    for kind, counts in one.counts.items():
        *late, first = sorted(counts)
        for count in late:
            ranks = counts[count]
            yield problem(
                "late", kind, ranks,
                f"{ranks} of {of} {_verb(ranks, 'has', 'have')} launched {count:,} {kind} and {counts[first]} {first:,}: "
                f"{_verb(ranks, 'it is', 'they are')} late by {first - count:,}", count + 1,
            )  # fmt: skip


def _verb(ranks: _RankSet, one: str, several: str) -> str:
    return one if ranks.number == 1 else several
