"""Watchdog: detects that a rank makes no progress, reports which ranks block it and ends it; explains errors of lost peers.

A collective that waits for a lost rank looks the same on every other rank. So each rank publishes its phase and a beat in a
heartbeat; a rank without progress for too long reads the heartbeats twice and names the ranks that are silent or behind.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import FrameType
from typing import Self

import torch.distributed as dist

from ultrascale.launch.exit_reason import LOST_PEER_MESSAGES
from ultrascale.launch.heartbeat import Heartbeat, RankStatus, silent_ranks
from ultrascale.launch.rank_info import MAX_NAMED_RANKS
from ultrascale.parallel.comm import AsyncCollective, Axis
from ultrascale.parallel.torch_private import op_name
from ultrascale.specs.printable import printable

BEATS_BETWEEN_READS = 2.5  # minimum beats between two reads before a rank is called silent
LONGEST_WAIT_S = 10.0  # limit of that time when an error is explained
ALL_RANKS_AGREE = "Every rank lives and says the same"
LONGEST_READ_S = 20.0  # limit for reading all ranks' statuses from a store
UNKNOWN_COLLECTIVE = "unknown"
STACK_LINES = 12  # innermost frames that a report shows
_DISTRIBUTED = f"torch{os.sep}distributed{os.sep}"
_WRAPPERS = ("wrapper", "inner", "_fn")  # decorators of torch's collectives
_NAMES = {
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "all_gather",
    "ALLGATHER_COALESCED": "all_gather",
    "REDUCE_SCATTER": "reduce_scatter",
    "_REDUCE_SCATTER_BASE": "reduce_scatter",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all",
}


def lost_a_peer(error: BaseException) -> bool:
    """Whether another rank, or the connection to it, is what failed."""
    return any(word in str(error) for word in LOST_PEER_MESSAGES)


class Watchdog:
    """Watches one rank's main thread. The loop calls `at` at the start of every phase."""

    def __init__(
        self,
        heartbeat: Heartbeat,
        rank: int,
        world: int,
        timeout_s: float,
        describe: Callable[[int], str],
        on_stuck: Callable[[str], None] | None = None,
    ) -> None:
        """`describe`: a rank's coordinates, such as `dp 1, tp 0`. `on_stuck` gets the report instead of the error stream."""
        self._heartbeat, self._rank, self._world, self._timeout_s = heartbeat, rank, world, timeout_s
        self._describe, self._on_stuck = describe, on_stuck or _print
        self._interval_s = min(heartbeat.beat_s, timeout_s / 8)
        self._status = RankStatus(0, "starting", time.time())
        self._progress_at = time.monotonic()
        self._beats = 0
        self._waits_for_disk = False
        self._ended, self._silent = threading.Event(), threading.Event()
        # Two threads: writing to a store whose host is stopped never returns, and must not block the watch thread.
        self._threads = [threading.Thread(target=work, name="watchdog", daemon=True) for work in (self._watch, self._beat)]

    def __enter__(self) -> Self:
        self._progress_at = time.monotonic()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        self._ended.set()
        # A rank that lost a peer beats until it exits: others that explain the same loss must not report it as dead.
        if error is None or not lost_a_peer(error):
            self._silent.set()
        for thread in self._threads:
            thread.join(self._interval_s if self._silent.is_set() else 0)

    @property
    def step(self) -> int:
        return self._status.step

    def __str__(self) -> str:
        return str(self._status)

    def use(self, heartbeat: Heartbeat) -> None:
        """Switches to another heartbeat: a store exists only after the rendezvous."""
        self._heartbeat = heartbeat
        self._interval_s = min(heartbeat.beat_s, self._timeout_s / 8)

    def at(self, step: int, doing: str) -> None:
        """Called when this rank begins a phase. Costs no system call."""
        self._status = RankStatus(step, doing, time.time(), self._beats)
        self._progress_at = time.monotonic()
        self._waits_for_disk = False
        if self._heartbeat.immediate:
            self._heartbeat.write(self._rank, self._status)

    def waits_for_disk(self, step: int, doing: str) -> None:
        """Like `at`, called repeatedly while waiting for a disk, which may take long: only a silent rank ends the run then."""
        if not self._waits_for_disk or self._status.doing != doing:
            self.at(step, doing)
        self._progress_at = time.monotonic()
        self._waits_for_disk = True

    def explain(self, error: BaseException) -> str:
        """The report for an error of gloo, NCCL or the store: where this rank was, and which ranks are lost."""
        status, collective, first = self._status, waits_in(error), self._read()
        time.sleep(min(BEATS_BETWEEN_READS * self._interval_s, LONGEST_WAIT_S))
        where = f"step {status.step}, {status.doing}" + (f", in {collective}" if collective else "")
        return "\n".join(
            [
                f"{self._name(self._rank)} lost a peer at {where}: {_first_line(error)}",
                *self._blockers(first, self._read()),
            ]
        )

    def _watch(self) -> None:
        reads: list[Mapping[int, RankStatus] | None] = []  # None: the store did not answer
        disk = _SilenceDetector(self._timeout_s)
        while not self._sleep():
            still_s = time.monotonic() - self._progress_at
            if self._waits_for_disk and (stuck := disk.ranks(self._read)):
                self._on_stuck(self._report_silent(stuck))
                os._exit(1)
            if still_s < self._timeout_s / 2:
                reads = []
            elif not reads:
                reads = [self._read()]
            elif still_s >= self._timeout_s:
                report = self._report(still_s, reads[0])
                if ALL_RANKS_AGREE in report and waits_in() is not None:
                    # A rank that hangs outside of the collective that the others wait in knows best where: it reports first.
                    time.sleep(min(BEATS_BETWEEN_READS * self._interval_s, LONGEST_WAIT_S))
                self._on_stuck(report)
                os._exit(1)  # the main thread is in a call that cannot be interrupted

    def _sleep(self) -> bool:
        """Sleeps one interval; time during which the whole process was stopped does not count as lack of progress."""
        start = time.monotonic()
        ended = self._ended.wait(self._interval_s)
        lost = time.monotonic() - start - self._interval_s
        if lost > self._timeout_s / 4:
            self._progress_at += lost
        return ended

    def _beat(self) -> None:
        while not self._silent.wait(self._interval_s):
            self._beats += 1
            status = self._status
            with suppress(Exception):  # a store whose host is lost: the report says so
                self._heartbeat.write(self._rank, RankStatus(status.step, status.doing, status.since, self._beats))

    def _read(self) -> Mapping[int, RankStatus] | None:
        """The statuses of all ranks; None if the heartbeat does not answer in time."""
        found: list[Mapping[int, RankStatus]] = []

        def read() -> None:
            with suppress(Exception):
                found.append(self._heartbeat.read(self._status.step))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(min(LONGEST_READ_S, self._timeout_s / 4))
        return found[0] if found else None

    def _report(self, still_s: float, before: Mapping[int, RankStatus] | None) -> str:
        status, collective = self._status, waits_in()
        where = f"waiting in {collective}" if collective else "in no collective that can be seen from Python"
        return "\n".join(
            [
                f"{self._name(self._rank)} has not moved for {still_s:.0f} s: {status}, {where}",
                *self._blockers(before, self._read()),
                f"What {self._name(self._rank)} is doing, innermost last:",
                _stack(),
                "If the ranks are only slow, train.timeout_s can be longer.",
            ]
        )

    def _report_silent(self, statuses: Mapping[int, RankStatus]) -> str:
        ranks = sorted(statuses)
        return "\n".join(
            [
                f"{self._name(self._rank)} waits for ranks that have been silent for {self._timeout_s:.0f} s: {self._status}",
                *self._lines(ranks, statuses, "is silent: stopped, dead or out of reach; it last said"),
                _advice(ranks),
            ]
        )

    def _blockers(self, before: Mapping[int, RankStatus] | None, now: Mapping[int, RankStatus] | None) -> list[str]:
        """Lines of the report about the ranks that block this one."""
        if now is None or before is None:
            return ["The store that ranks met at does not answer: its host is gone or out of reach. Look there first."]
        if not now:
            return ["Other ranks of this step say who holds everybody up."]
        others = {rank: status for rank, status in now.items() if rank != self._rank}
        hung = silent_ranks(before, others)
        never = [rank for rank in range(self._world) if rank not in now and rank != self._rank]
        late = [rank for rank in others if rank not in hung and others[rank].step < self._status.step]
        elsewhere = [
            rank
            for rank in others
            if rank not in hung and others[rank].step == self._status.step and others[rank].doing != self._status.doing
        ]
        lines = [
            *self._lines(hung, now, "is silent: stopped, dead or out of reach; it last said"),
            *self._lines(never, now, "never said anything: it did not start, or cannot be reached"),
            *self._lines(late, now, "is behind:"),
            *self._lines(elsewhere, now, "is elsewhere:"),
        ]
        if hung or never:
            lines.append(_advice(hung + never))
        elif not lines:
            lines.append(f"{ALL_RANKS_AGREE}: the collective itself failed, or ranks disagree about its shape or type.")
        return lines

    def _lines(self, ranks: list[int], statuses: Mapping[int, RankStatus], words: str) -> Iterable[str]:
        for rank in ranks[:MAX_NAMED_RANKS]:
            last = f" {statuses[rank]}" if rank in statuses else ""
            yield f"{self._name(rank)} {words}{last}"
        if len(ranks) > MAX_NAMED_RANKS:
            yield f"and {len(ranks) - MAX_NAMED_RANKS} more ranks, of {self._world}"

    def _name(self, rank: int) -> str:
        place = self._describe(rank)
        return f"rank {rank} ({place})" if place else f"rank {rank}"


class _SilenceDetector:
    """Finds ranks whose beat has not changed for `timeout_s`, from occasional reads."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._looked = -math.inf
        self._last: dict[int, tuple[int, float]] = {}

    def ranks(self, read: Callable[[], Mapping[int, RankStatus] | None]) -> dict[int, RankStatus]:
        """The silent ranks with their last status."""
        now = time.monotonic()
        if now - self._looked < self._timeout_s / 4:
            return {}
        if now - self._looked > self._timeout_s:  # the last read belongs to an earlier wait and is stale
            self._last = {}
        self._looked, statuses = now, read() or {}
        for rank, status in statuses.items():
            if self._last.get(rank, (-1, now))[0] != status.beat:
                self._last[rank] = (status.beat, now)
        return {
            rank: statuses[rank] for rank, (_, at) in self._last.items() if rank in statuses and now - at >= self._timeout_s
        }


def _advice(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:MAX_NAMED_RANKS]))
    return f"Look at rank {named}: its process (a state of T is stopped), its machine's log, its memory, its link."


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__


def _print(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


def waits_in(error: BaseException | None = None) -> str | None:
    """`all_reduce over dp`, `recv over pp`, `all_gather of FSDP2, over dp`: where the main thread is, or an error was raised.

    None if it is in no collective that is visible from Python.
    """
    walk = traceback.walk_stack(_main_frame()) if error is None else reversed(list(traceback.walk_tb(error.__traceback__)))
    frames = [frame for frame, _ in walk]  # innermost first
    depth = next((depth for depth, frame in enumerate(frames) if _kind(frame) is not None), None)
    if depth is None:
        return None
    kind = _kind(frames[depth])
    return f"{'a collective' if kind == UNKNOWN_COLLECTIVE else kind}{_axis_suffix(frames[depth:])}"


def _stack() -> str:
    """The innermost lines of the main thread's stack."""
    lines = traceback.extract_stack(_main_frame())
    ours = [line for line in lines if f"{os.sep}multiprocessing{os.sep}" not in line.filename]
    return "".join(traceback.format_list(ours[-STACK_LINES:])).rstrip()


def _main_frame() -> FrameType | None:
    identity = threading.main_thread().ident
    return None if identity is None else sys._current_frames().get(identity)


def _kind(frame: FrameType) -> str | None:
    owner = frame.f_locals.get("self")
    if isinstance(owner, AsyncCollective):
        return owner.name
    work = frame.f_locals.get("work")
    if isinstance(work, dist.Work):  # the name of the local variable in pipeline.py and in torch
        name = op_name(work)
        return _NAMES.get(name, name.lower())
    name = frame.f_code.co_name
    return name if _DISTRIBUTED in frame.f_code.co_filename and name not in _WRAPPERS else None


def _axis_suffix(frames: list[FrameType]) -> str:
    """The axis, from the object that waits, or from the nearest frame outside torch.distributed."""
    if any(f"{os.sep}fsdp{os.sep}" in frame.f_code.co_filename for frame in frames):
        return " of FSDP2, over dp"
    ours = next((frame for frame in frames if _DISTRIBUTED not in frame.f_code.co_filename), None)
    if ours is None:
        return ""
    if ours.f_code.co_filename.endswith(os.path.join("parallel", "pipeline.py")):
        return " over pp"
    owned = getattr(ours.f_locals.get("self"), "_axis", None)
    axis = owned if isinstance(owned, Axis) else ours.f_locals.get("axis")
    return f" over {axis.name}" if isinstance(axis, Axis) else ""
