"""Notices that a rank no longer moves, finds out for whom it waits, says so and ends it; explains errors of lost peers.

A collective that waits for a rank that will never come looks the same on every other rank. So each says on a heartbeat what it
does, and lives; whoever has not moved for too long reads the heartbeat twice and names the ranks that are silent or behind.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Self

from ultrascale.parallel.exit_reason import LOST
from ultrascale.specs.printable import printable
from ultrascale.train import waiting
from ultrascale.train.heartbeat import Heartbeat, RankStatus, silent

NAMED = 8  # ranks that a report names one by one
LOOKS = 2.5  # beats between two looks, at least, before a rank is called silent
LONGEST_LOOK_S = 10.0  # while an error is explained
SAME = "Every rank lives and says the same"
LONGEST_READ_S = 20.0  # of every rank's note from a store


def lost_a_peer(error: BaseException) -> bool:
    """Whether another rank, or the way to it, is what failed."""
    return any(word in str(error) for word in LOST)


class Watchdog:
    """Watches one rank's main thread. The loop calls `at` whenever it begins with something else."""

    def __init__(
        self,
        heartbeat: Heartbeat,
        rank: int,
        world: int,
        timeout_s: float,
        describe: Callable[[int], str],
        on_stuck: Callable[[str], None] | None = None,
    ) -> None:
        """`describe`: a rank's place in words, such as `dp 1, tp 0`. `on_stuck` gets the report instead of the error stream."""
        self._board, self._rank, self._world, self._timeout_s = heartbeat, rank, world, timeout_s
        self._describe, self._on_stuck = describe, on_stuck or _print
        self._interval_s = min(heartbeat.beat_s, timeout_s / 8)
        self._note = RankStatus(0, "starting", time.time())
        self._moved = time.monotonic()
        self._beats = 0
        self._waits_for_disk = False
        self._ended, self._silent = threading.Event(), threading.Event()
        # Two threads: writing to a store whose host is stopped never returns, and that must not stop the watching.
        self._threads = [
            threading.Thread(target=work, name="watchdog", daemon=True) for work in (self._watch, self._keep_beating)
        ]

    def __enter__(self) -> Self:
        self._moved = time.monotonic()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        self._ended.set()
        # Who lost a peer goes on beating until it ends: others that explain the same loss must not take it for dead.
        if error is None or not lost_a_peer(error):
            self._silent.set()
        for thread in self._threads:
            thread.join(self._interval_s if self._silent.is_set() else 0)

    @property
    def step(self) -> int:
        return self._note.step

    def __str__(self) -> str:
        return str(self._note)

    def use(self, heartbeat: Heartbeat) -> None:
        """From now on ranks write there: a store exists only once they have met."""
        self._board = heartbeat
        self._interval_s = min(heartbeat.beat_s, self._timeout_s / 8)

    def at(self, step: int, doing: str) -> None:
        """This rank begins with that now. Costs no system call."""
        self._note = RankStatus(step, doing, time.time(), self._beats)
        self._moved = time.monotonic()
        self._waits_for_disk = False
        if self._board.immediate:
            self._board.write(self._rank, self._note)

    def waits_for_disk(self, step: int, doing: str) -> None:
        """As `at`, to be repeated while a disk is waited for, which may take long: only a rank that is silent ends the run."""
        if not self._waits_for_disk or self._note.doing != doing:
            self.at(step, doing)
        self._moved = time.monotonic()
        self._waits_for_disk = True

    def explain(self, error: BaseException) -> str:
        """An error of gloo, NCCL or the store as a sentence: where this rank was, and who is gone."""
        note, exchange, first = self._note, waiting.collective(error), self._read()
        time.sleep(min(LOOKS * self._interval_s, LONGEST_LOOK_S))
        where = f"step {note.step}, {note.doing}" + (f", in {exchange}" if exchange else "")
        return "\n".join(
            [f"{self._name(self._rank)} lost a peer at {where}: {_first_line(error)}", *self._who(first, self._read())]
        )

    def _watch(self) -> None:
        looks: list[Mapping[int, RankStatus] | None] = []  # None: the store did not answer
        disk = _Silence(self._timeout_s)
        while not self._sleep():
            still_s = time.monotonic() - self._moved
            if self._waits_for_disk and (gone := disk.ranks(self._read)):
                self._on_stuck(self._report_silent(gone))
                os._exit(1)
            if still_s < self._timeout_s / 2:
                looks = []
            elif not looks:
                looks = [self._read()]
            elif still_s >= self._timeout_s:
                report = self._report(still_s, looks[0])
                if SAME in report and waiting.collective() is not None:
                    # Somebody hangs outside of the collective that the others wait in, and knows best where: it reports first.
                    time.sleep(min(LOOKS * self._interval_s, LONGEST_LOOK_S))
                self._on_stuck(report)
                os._exit(1)  # the main thread waits in a call that nothing can interrupt

    def _sleep(self) -> bool:
        """One interval; a whole process that was stopped meanwhile has not been still for that time."""
        start = time.monotonic()
        ended = self._ended.wait(self._interval_s)
        lost = time.monotonic() - start - self._interval_s
        if lost > self._timeout_s / 4:
            self._moved += lost
        return ended

    def _keep_beating(self) -> None:
        while not self._silent.wait(self._interval_s):
            self._beats += 1
            note = self._note
            with suppress(Exception):  # a store whose host is gone: the report says so
                self._board.write(self._rank, RankStatus(note.step, note.doing, note.since, self._beats))

    def _read(self) -> Mapping[int, RankStatus] | None:
        """None where the heartbeat does not answer in time."""
        found: list[Mapping[int, RankStatus]] = []

        def ask() -> None:
            with suppress(Exception):
                found.append(self._board.read(self._note.step))

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(min(LONGEST_READ_S, self._timeout_s / 4))
        return found[0] if found else None

    def _report(self, still_s: float, before: Mapping[int, RankStatus] | None) -> str:
        note, exchange = self._note, waiting.collective()
        where = f"waiting in {exchange}" if exchange else "in no exchange that can be seen from Python"
        return "\n".join(
            [
                f"{self._name(self._rank)} has not moved for {still_s:.0f} s: {note}, {where}",
                *self._who(before, self._read()),
                f"What {self._name(self._rank)} is doing, innermost last:",
                waiting.stack(),
                "If the ranks are only slow, train.timeout_s can be longer.",
            ]
        )

    def _report_silent(self, notes: Mapping[int, RankStatus]) -> str:
        ranks = sorted(notes)
        return "\n".join(
            [
                f"{self._name(self._rank)} waits for ranks that have been silent for {self._timeout_s:.0f} s: {self._note}",
                *self._lines(ranks, notes, "is silent: stopped, dead or out of reach; it last said"),
                _look_at(ranks),
            ]
        )

    def _who(self, before: Mapping[int, RankStatus] | None, now: Mapping[int, RankStatus] | None) -> list[str]:
        """Lines about the ranks that hold this one up."""
        if now is None or before is None:
            return ["The store that ranks met at does not answer: its host is gone or out of reach. Look there first."]
        if not now:
            return ["Other ranks of this step say who holds everybody up."]
        others = {rank: note for rank, note in now.items() if rank != self._rank}
        gone = silent(before, others)
        never = [rank for rank in range(self._world) if rank not in now and rank != self._rank]
        behind = [rank for rank in others if rank not in gone and others[rank].step < self._note.step]
        apart = [
            rank
            for rank in others
            if rank not in gone and others[rank].step == self._note.step and others[rank].doing != self._note.doing
        ]
        lines = [
            *self._lines(gone, now, "is silent: stopped, dead or out of reach; it last said"),
            *self._lines(never, now, "never said anything: it did not start, or cannot be reached"),
            *self._lines(behind, now, "is behind:"),
            *self._lines(apart, now, "is elsewhere:"),
        ]
        if gone or never:
            lines.append(_look_at(gone + never))
        elif not lines:
            lines.append(f"{SAME}: the exchange itself failed, or ranks disagree about what to exchange.")
        return lines

    def _lines(self, ranks: list[int], notes: Mapping[int, RankStatus], words: str) -> Iterable[str]:
        for rank in ranks[:NAMED]:
            said = f" {notes[rank]}" if rank in notes else ""
            yield f"{self._name(rank)} {words}{said}"
        if len(ranks) > NAMED:
            yield f"and {len(ranks) - NAMED} more ranks, of {self._world}"

    def _name(self, rank: int) -> str:
        place = self._describe(rank)
        return f"rank {rank} ({place})" if place else f"rank {rank}"


class _Silence:
    """Which ranks have not beaten for a time, looked at now and then."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._looked = -math.inf
        self._heard: dict[int, tuple[int, float]] = {}

    def ranks(self, read: Callable[[], Mapping[int, RankStatus] | None]) -> dict[int, RankStatus]:
        """The silent ranks with what they last said."""
        now = time.monotonic()
        if now - self._looked < self._timeout_s / 4:
            return {}
        if now - self._looked > self._timeout_s:  # not in the last wait: what was heard then says nothing
            self._heard = {}
        self._looked, notes = now, read() or {}
        for rank, note in notes.items():
            if self._heard.get(rank, (-1, now))[0] != note.beat:
                self._heard[rank] = (note.beat, now)
        return {rank: notes[rank] for rank, (_, at) in self._heard.items() if rank in notes and now - at >= self._timeout_s}


def _look_at(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:NAMED]))
    return f"Look at rank {named}: its process (a state of T is stopped), its machine's log, its memory, its link."


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__


def _print(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
