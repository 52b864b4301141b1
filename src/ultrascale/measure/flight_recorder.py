"""Read dumps of torch's flight recorder: which ranks did not join which collective, and which joined different ones.

A dump is one rank's last collectives, as torch writes them when a collective times out (TORCH_FR_DUMP_TEMP_FILE, or
`_dump_nccl_trace`): a pickle, or JSON. A pickle can run code, so that only the plain containers and values in it are read.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ultrascale.measure.trace_rank import kind_of, rank_list
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import read_bytes, reason_of
from ultrascale.specs.validate import shown

MAX_DUMPS = 1024
MAX_DUMP_BYTES = 256 * 2**20
SAME_SIZES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
"""kinds whose sizes are equal on all ranks"""
_RAS = re.compile(rb'\s*(?:(?:SERVER PROTOCOL \d+|OK)\s*\n)*(?:NCCL version \d|\{\s*"nccl_version")')
_MESSAGE = re.compile(r"(send|recv) (\d+)(->|<-)(\d+)")


class _PlainUnpickler(pickle._Unpickler):
    """Containers, texts and numbers only. Python's own unpickler, since that written in C takes no table of opcodes, and
    allocates as much memory as a file asks for.
    """

    dispatch = {  # noqa: RUF012
        opcode[0]: pickle._Unpickler.dispatch[opcode[0]]
        for opcode in (
            pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE,
            pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT,
            pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS,
            pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3,
            pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS,
            pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET,
        )
    }  # fmt: skip


class RecordedCollective(NamedTuple):
    """A collective that a rank started."""

    sequence: int
    kind: str
    sizes: str
    """of inputs and outputs, with types"""
    state: str
    """scheduled, started, completed; gloo leaves it at scheduled"""
    where: str
    """the caller: file, line and function"""
    order: int
    """among all of the rank's"""


@dataclass(frozen=True)
class RankDump:
    file: str
    rank: int
    groups: dict[str, dict[int, RecordedCollective]]
    """by name and sequence number"""
    enqueued: dict[str, int]
    """the last sequence number of each group"""
    descriptions: dict[str, str]
    members: dict[str, tuple[int, ...]]
    messages: Counter[tuple[str, str, int, int]]
    """by group, send or recv, source and target"""
    whole: bool
    """the buffer holds every collective since the start"""


class _BrokenDumpError(SpecError):
    """A dump that ends too early: of a process that was ended while it wrote."""


@dataclass(frozen=True)
class Problem:
    """A collective that ranks did not join, or in which they differ."""

    group: str
    ranks: int
    """of the group"""
    sequence: int
    kind: str
    what: str
    """missing, mismatch or message; late or error where RAS was read"""
    culprits: tuple[int, ...]
    sentence: str


@dataclass(frozen=True)
class DumpAnalysis:
    ranks: int
    collectives: int
    groups: int
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    nccl: str | None = None
    """version of the NCCL whose RAS was read, instead of dumps: then `groups` are communicators"""


def read(given: Sequence[Path], say: Callable[[str], None] = lambda _: None) -> tuple[list[RankDump], list[str]]:
    """The dumps by rank, and notes on those that cannot be read while others can."""
    for path in given:
        if not path.exists():
            raise SpecError(f"--flight-recorder {path} does not exist: give a folder with files such as nccl_trace_rank_0")
    paths = [one for path in given for one in (sorted(path.iterdir()) if path.is_dir() else [path]) if not one.is_dir()]
    if not paths:
        raise SpecError(f"--flight-recorder {given[0]} has no dumps: give a folder with files such as nccl_trace_rank_0")
    if len(paths) > MAX_DUMPS:
        raise SpecError(f"--flight-recorder names {len(paths):,} files but at most {MAX_DUMPS:,} are read: name fewer")
    found: dict[int, RankDump] = {}
    broken: list[str] = []
    for done, path in enumerate(paths, 1):
        try:
            one = _dump(path)
        except _BrokenDumpError as error:
            broken.append(str(error))
            continue
        if one.rank in found:
            raise SpecError(
                f"--flight-recorder: rank {one.rank} is in {found[one.rank].file} and in {path}: name each rank's dump once"
            )
        found[one.rank] = one
        say(f"reading dumps: {done:,} of {len(paths):,}")
    if not found:
        raise SpecError(broken[0])
    return [found[rank] for rank in sorted(found)], broken


def is_ras(raw: bytes) -> bool:
    """Whether a file is output of NCCL's RAS, which nccl_ras.py reads."""
    return _RAS.match(raw[:4096]) is not None


def _dump(path: Path) -> RankDump:
    data = _loaded(path)
    numbers = re.findall(r"\d+", path.name.removesuffix(".json").removesuffix(".pickle"))
    if not numbers:
        raise SpecError(f"--flight-recorder {path} does not end in its rank: name it as torch does, such as nccl_trace_rank_0")
    entries = data.get("entries")
    if not isinstance(entries, list):
        raise SpecError(f"--flight-recorder {path} is no dump (it has no entries): give what torch's flight recorder wrote")
    groups: dict[str, dict[int, RecordedCollective]] = defaultdict(dict)
    enqueued: dict[str, int] = {}
    descriptions: dict[str, str] = {}
    names: dict[str, str] = {}
    messages: Counter[tuple[str, str, int, int]] = Counter()
    for order, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise SpecError(f"--flight-recorder {path}: entry {order} is {shown(entry)} but must be an object: dump it again")
        name, description = _group(entry)
        descriptions[name], names[str(entry.get("pg_id"))] = description, name
        if (found := _MESSAGE.search(str(entry.get("profiling_name", "")))) is not None:
            own, other = int(found[2]), int(found[4])
            messages[(name, found[1], own, other) if found[1] == "send" else (name, found[1], other, own)] += 1
        elif not entry.get("is_p2p"):
            one = _collective(entry, order)
            groups[name].setdefault(one.sequence, one)
            enqueued[name] = max(enqueued.get(name, 0), one.sequence)
    for identifier, last in _enqueued(data):
        if (name := names.get(identifier, "")) in enqueued:
            enqueued[name] = max(enqueued[name], last)
    first = entries[0].get("record_id") if entries else 0
    return RankDump(
        str(path), int(numbers[-1]), groups, enqueued, descriptions, dict(_members(data)), messages, first in (0, None)
    )


def _loaded(path: Path) -> dict[str, Any]:
    try:
        raw = read_bytes(path, MAX_DUMP_BYTES)
    except OSError as error:
        raise SpecError(f"--flight-recorder {path} {reason_of(error)}: give a folder of dumps") from None
    if is_ras(raw):
        raise SpecError(f"--flight-recorder {path} is output of ncclras, which is no dump of one rank: name it alone")
    try:
        data = json.loads(raw) if raw.lstrip()[:1] == b"{" else _PlainUnpickler(io.BytesIO(raw)).load()
    except (pickle.UnpicklingError, EOFError, KeyError, IndexError, TypeError, ValueError, RecursionError, AttributeError):
        raise _BrokenDumpError(
            f"--flight-recorder {path} is no dump, or is cut off: give JSON, or a pickle of plain values, as torch's flight "
            "recorder writes them, or the output of ncclras"
        ) from None
    if not isinstance(data, dict):
        raise SpecError(f"--flight-recorder {path} is no dump (it is {shown(data)}): give what torch's flight recorder wrote")
    return data


def _group(entry: dict[str, Any]) -> tuple[str, str]:
    both = entry.get("process_group")
    if isinstance(both, list | tuple) and len(both) == 2:
        return str(both[0]), str(both[1])
    return str(entry.get("pg_name", entry.get("pg_id", ""))), ""


def _collective(entry: dict[str, Any], order: int) -> RecordedCollective:
    sequence = entry.get("collective_seq_id")
    frames = entry.get("frames")
    calls = [one for one in frames if isinstance(one, dict)] if isinstance(frames, list) else []
    frame = next((one for one in calls if "/torch/" not in str(one.get("filename"))), calls[0] if calls else {})
    where = f"{Path(str(frame.get('filename', ''))).name}:{frame.get('line')} ({frame.get('name')})" if frame else ""
    sides = [f"{_plain(entry.get(f'{side}_sizes'))} {_plain(entry.get(f'{side}_dtypes'))}" for side in ("input", "output")]
    name = str(entry.get("profiling_name", ""))
    kind = kind_of(name)
    return RecordedCollective(
        sequence if isinstance(sequence, int) else 0,
        name.split(":")[-1][:60] if kind == "other" else kind,
        " to ".join(dict.fromkeys(sides)),
        str(entry.get("state", "")),
        where[:100],
        order,
    )


def _plain(value: Any) -> str:
    """`[131584]` of `[[131584]]`, `Float` of `['Float']`; cut where there are many."""
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    return str(value)[:80].replace("'", "")


def _enqueued(data: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """The last sequence number by `pg_id`, which entries have beside the group's name."""
    status = data.get("pg_status")
    for name, one in status.items() if isinstance(status, dict) else ():
        last = one.get("last_enqueued_collective") if isinstance(one, dict) else None
        if isinstance(last, int) and last > 0:
            yield str(name), last


def _members(data: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    listed = data.get("pg_config")
    for name, one in listed.items() if isinstance(listed, dict) else ():
        ranks = one.get("ranks") if isinstance(one, dict) else None
        yield str(name), tuple(int(rank) for rank in re.findall(r"\d{1,9}", str(ranks)))


def analyse(dumps: Sequence[RankDump], broken: Sequence[str] = ()) -> DumpAnalysis:
    ranks = {one.rank: one for one in dumps}
    groups: dict[tuple[str, tuple[int, ...]], None] = {}
    for one in dumps:
        for name in {*one.groups, *one.enqueued}:
            groups[name, _ranks_of(name, one, ranks)] = None
    problems = [*_collectives(groups, ranks), *_messages(dumps)]
    total = len(
        {
            (name, members, seq)
            for name, members in groups
            for r in members
            if r in ranks
            for seq in ranks[r].groups.get(name, ())
        }
    )
    return DumpAnalysis(len(dumps), total, len(groups), tuple(problems), (*broken, *_notes(groups, ranks)))


def _ranks_of(name: str, one: RankDump, ranks: dict[int, RankDump]) -> tuple[int, ...]:
    """The group's ranks by the dump; else all that have a group of this name, and for the default group every rank."""
    if one.members.get(name):
        return one.members[name]
    if one.descriptions.get(name) == "default_pg":
        everyone = {rank for dump in ranks.values() for members in dump.members.values() for rank in members}
        return tuple(sorted(everyone | set(ranks)))
    return tuple(rank for rank, dump in ranks.items() if name in dump.groups or name in dump.enqueued)


def _words(name: str, members: Sequence[int], ranks: dict[int, RankDump]) -> str:
    described = next((ranks[rank].descriptions.get(name) for rank in members if rank in ranks), None)
    both = name[:12] if described in (None, "", "undefined") else f"{described[:40]} ({name[:12]})"
    return f"group {both} of {len(members):,} ranks"


def _collectives(groups: dict[tuple[str, tuple[int, ...]], None], ranks: dict[int, RankDump]) -> Iterator[Problem]:
    """The first of each group that ranks did not join, or in which they differ."""
    for name, members in groups:
        known = [rank for rank in members if rank in ranks]
        last = {rank: ranks[rank].enqueued.get(name, 0) for rank in known}
        if (different := _mismatch(name, members, known, ranks)) is not None:
            yield different
        if not last or len(set(last.values())) == 1:
            continue
        sequence = min(last.values()) + 1
        absent = [rank for rank in known if last[rank] < sequence]
        joined = [rank for rank in known if rank not in absent]
        one = next(
            (ranks[rank].groups[name][sequence] for rank in joined if sequence in ranks[rank].groups.get(name, {})), None
        )
        kind = one.kind if one is not None else "collective"
        what = f"{kind} {sequence:,}" + (f" ({one.sizes}, called at {one.where})" if one is not None and one.where else "")
        yield Problem(
            name, len(members), sequence, kind, "missing", tuple(absent),
            f"{rank_list(absent)} did not join {what} of {_words(name, members, ranks)}, in which {rank_list(joined)} "
            f"{'waits' if len(joined) == 1 else 'wait'}: {_instead(absent[0], ranks)}",
        )  # fmt: skip


def _instead(rank: int, ranks: dict[int, RankDump]) -> str:
    """What a rank did last."""
    dump = ranks[rank]
    both = [(one, name) for name, group in dump.groups.items() for one in group.values()]
    if not both:
        return f"rank {rank} has recorded no collective at all"
    one, name = max(both, key=lambda pair: pair[0].order)
    at = f", called at {one.where}" if one.where else ""
    described = dump.descriptions.get(name, "")
    group = described if described not in ("", "undefined") else name[:12]
    return f"the last that rank {rank} started is {one.kind} {one.sequence:,} of {group}{at}"


def _mismatch(name: str, members: Sequence[int], known: Sequence[int], ranks: dict[int, RankDump]) -> Problem | None:
    sequences = sorted({sequence for rank in known for sequence in ranks[rank].groups.get(name, ())})
    for sequence in sequences:
        found = {rank: ranks[rank].groups[name][sequence] for rank in known if sequence in ranks[rank].groups.get(name, {})}
        kinds = {one.kind for one in found.values()}
        fields = ["kind"] if len(kinds) > 1 else ["sizes"] * (kinds <= set(SAME_SIZES))
        for field in fields:
            by_value: dict[str, list[int]] = defaultdict(list)
            for rank, one in found.items():
                by_value[getattr(one, field)].append(rank)
            if len(by_value) > 1:
                (usual, most), *others = sorted(by_value.items(), key=lambda pair: -len(pair[1]))
                wrong = sorted(rank for _, some in others for rank in some)
                kind = found[most[0]].kind
                return Problem(
                    name, len(members), sequence, kind, "mismatch", tuple(wrong),
                    f"{rank_list(wrong)} {'has' if len(wrong) == 1 else 'have'} {others[0][0]} and {rank_list(most)} "
                    f"{'has' if len(most) == 1 else 'have'} {usual} in collective {sequence:,} ({kind}) of "
                    f"{_words(name, members, ranks)}, called at {found[wrong[0]].where or 'an unknown place'}",
                )  # fmt: skip
    return None


def _messages(dumps: Sequence[RankDump]) -> Iterator[Problem]:
    """Sends without a receive, and the reverse; only where no buffer has lost its first entries."""
    if not all(one.whole for one in dumps):
        return
    ranks = {one.rank for one in dumps}
    total: Counter[tuple[str, str, int, int]] = Counter()
    for one in dumps:
        total.update(one.messages)
    for name, source, target in sorted({(name, source, target) for name, _, source, target in total}):
        sent, asked = (total[name, what, source, target] for what in ("send", "recv"))
        if sent != asked and {source, target} <= ranks:
            late = source if sent < asked else target
            yield Problem(
                name, 2, min(sent, asked) + 1, "send_recv", "message", (late,),
                f"rank {source} sent {sent:,} messages to rank {target} in group {name[:12]}, which asked for {asked:,}: rank "
                f"{late} did not {'send' if late == source else 'receive'} number {min(sent, asked) + 1:,}",
            )  # fmt: skip


def _notes(groups: dict[tuple[str, tuple[int, ...]], None], ranks: dict[int, RankDump]) -> Iterator[str]:
    everyone = {rank for _, members in groups for rank in members}
    missing = sorted(everyone - set(ranks))
    if missing:
        yield f"{rank_list(missing)} {'has' if len(missing) == 1 else 'have'} no dump here: what they joined is not known"
    for name, members in groups:
        known = [rank for rank in members if rank in ranks]
        last = {ranks[rank].enqueued.get(name, 0) for rank in known}
        if len(last) == 1 and (sequence := last.pop()):
            states = {rank: ranks[rank].groups.get(name, {}).get(sequence) for rank in known}
            open_ = [rank for rank, one in states.items() if one is not None and one.state == "started"]
            if open_:
                yield (
                    f"all ranks joined collective {sequence:,} of {_words(name, members, ranks)}, and it has not ended on "
                    f"{rank_list(open_)}: the transfer hung, or the dump was made in it"
                )
    cut = [one.rank for one in ranks.values() if not one.whole]
    if cut:
        yield f"the buffers of {rank_list(cut)} have lost their first entries: what came before is not compared"
