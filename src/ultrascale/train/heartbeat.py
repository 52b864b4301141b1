"""Where every rank says what it is doing, so that one that waits can tell for whom.

Local processes share memory that was mapped before they were forked; ranks of torchrun or Slurm share torch's store. A note
carries a number of beats and no time of the reader's clock: a rank is silent when two looks find the same beat.
"""

from __future__ import annotations

import json
import mmap
import struct
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

BEAT_S = 1.0
BEATS_A_SECOND = 500.0  # of all ranks together: what a store is asked to take
READERS = 8  # ranks that read everybody's notes when all are stuck in the same step
STORE_TIMEOUT = timedelta(seconds=5)  # a store that does not answer is gone, and so is its host
KEYS_AT_ONCE = 1024


@dataclass(frozen=True)
class RankStatus:
    """What one rank last said."""

    step: int
    doing: str
    since: float
    """seconds since the epoch at which it began with that"""
    beat: int = 0
    """grows as long as the rank's process lives and runs"""

    def __str__(self) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(self.since))
        return f"step {self.step}, {self.doing}, since {at}"


class Heartbeat(Protocol):
    """What the watchdog writes and reads."""

    beat_s: float
    """how often a rank should write that it lives"""
    immediate: bool
    """writing costs no more than memory: every change may be written at once"""

    def write(self, rank: int, note: RankStatus) -> None: ...

    def read(self, step: int) -> dict[int, RankStatus]:
        """Every rank's note; nothing where enough other ranks read because of this step."""


class SharedMemoryHeartbeat:
    """One slot a rank in memory that forked processes share."""

    beat_s, immediate = BEAT_S, True
    _slot = struct.Struct("<qqd104s")

    def __init__(self, world: int) -> None:
        self._world = world
        self._memory = mmap.mmap(-1, world * self._slot.size)

    def write(self, rank: int, note: RankStatus) -> None:
        doing = note.doing.encode()[:104]
        # A beat counts from 1 here: a slot of zeros is a rank that has said nothing.
        self._slot.pack_into(self._memory, rank * self._slot.size, note.beat + 1, note.step, note.since, doing)

    def read(self, step: int = 0) -> dict[int, RankStatus]:
        found = {}
        for rank in range(self._world):
            beat, at, since, doing = self._slot.unpack_from(self._memory, rank * self._slot.size)
            if beat:
                found[rank] = RankStatus(at, doing.rstrip(b"\0").decode(errors="replace"), since, beat - 1)
        return found

    def last(self, rank: int) -> str:
        """What a rank said last, in words; nothing if it said nothing."""
        note = self.read().get(rank)
        return "" if note is None else str(note)


class StoreHeartbeat:
    """One key a rank in the store that torch's processes met at."""

    immediate = False

    def __init__(self, store: Store, world: int) -> None:
        from torch._C._distributed_c10d import PrefixStore

        # A connection of its own: the main thread may wait in the other one.
        self._store = PrefixStore("ultrascale-heartbeat", store.clone())  # type: ignore[attr-defined]
        self._store.set_timeout(STORE_TIMEOUT)
        self._world = world
        self._tickets: dict[int, int] = {}
        self.beat_s = max(BEAT_S, world / BEATS_A_SECOND)

    def write(self, rank: int, note: RankStatus) -> None:
        self._store.set(str(rank), json.dumps([note.step, note.doing, note.since, note.beat]))

    def read(self, step: int) -> dict[int, RankStatus]:
        if self._ticket(step) > READERS:
            return {}
        found: dict[int, RankStatus] = {}
        for ranks in _pieces(range(self._world), KEYS_AT_ONCE):
            keys = {rank: str(rank) for rank in ranks}
            if not self._store.check(list(keys.values())):
                keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
            if keys:
                values = self._store.multi_get(list(keys.values()))
                found |= {rank: RankStatus(*json.loads(value)) for rank, value in zip(keys, values, strict=True)}
        return found

    def _ticket(self, step: int) -> int:
        if step not in self._tickets:
            self._tickets = {step: self._store.add(f"readers/{step}", 1)}
        return self._tickets[step]


def _pieces(ranks: range, size: int) -> Iterable[range]:
    return (ranks[start : start + size] for start in range(0, len(ranks), size))


def silent(before: Mapping[int, RankStatus], now: Mapping[int, RankStatus]) -> list[int]:
    """Ranks that have not beaten between two looks: stopped, dead or out of reach."""
    return sorted(rank for rank, note in now.items() if rank in before and before[rank].beat == note.beat)
