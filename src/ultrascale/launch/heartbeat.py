"""Heartbeats: every rank publishes its status, so that a waiting rank can find the rank that blocks it.

Local processes share memory that was mapped before they were forked; ranks of torchrun or Slurm share torch's store. A status
has a beat counter and no timestamp of the reader's clock: a rank is silent if two reads return the same beat.
"""

from __future__ import annotations

import json
import mmap
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ultrascale.parallel.torch_private import Store

BEAT_S = 1.0
BEATS_A_SECOND = 500.0  # of all ranks together: the load limit of a store
READERS = 8  # ranks that read the statuses of all ranks when all hang in the same step
STORE_TIMEOUT = timedelta(seconds=5)  # a store that does not answer is lost, and so is its host
KEYS_PER_READ = 1024


@dataclass(frozen=True)
class RankStatus:
    """The last status of one rank."""

    step: int
    doing: str
    since: float
    """when that began, in seconds since the epoch"""
    beat: int = 0
    """increases while the rank's process runs"""

    def __str__(self) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(self.since))
        return f"step {self.step}, {self.doing}, since {at}"


class Heartbeat(Protocol):
    """Storage of rank statuses that the watchdog writes and reads."""

    beat_s: float
    """interval at which a rank should write its beat"""
    immediate: bool
    """whether writing only costs a memory access, so that every change may be written at once"""

    def write(self, rank: int, status: RankStatus) -> None: ...

    def read(self, step: int) -> dict[int, RankStatus]:
        """The status of every rank; empty if enough other ranks already read because of this step."""


class SharedMemoryHeartbeat:
    """One slot per rank in memory that forked processes share."""

    beat_s, immediate = BEAT_S, True
    _slot = struct.Struct("<qqd104s")

    def __init__(self, world: int) -> None:
        self._world = world
        self._memory = mmap.mmap(-1, world * self._slot.size)

    def write(self, rank: int, status: RankStatus) -> None:
        doing = status.doing.encode()[:104]
        # Beats count from 1 here: a slot of zeros is a rank that has not written yet.
        self._slot.pack_into(self._memory, rank * self._slot.size, status.beat + 1, status.step, status.since, doing)

    def read(self, step: int = 0) -> dict[int, RankStatus]:
        found = {}
        for rank in range(self._world):
            beat, at, since, doing = self._slot.unpack_from(self._memory, rank * self._slot.size)
            if beat:
                found[rank] = RankStatus(at, doing.rstrip(b"\0").decode(errors="replace"), since, beat - 1)
        return found

    def last(self, rank: int) -> str:
        """The last status of a rank as text; empty if it has not written one."""
        status = self.read().get(rank)
        return "" if status is None else str(status)


class StoreHeartbeat:
    """One key per rank in the store of torch's rendezvous."""

    immediate = False

    def __init__(self, store: Store, world: int) -> None:
        from ultrascale.parallel.torch_private import PrefixStore

        # A separate connection: the main thread may be blocked in the other one.
        self._store = PrefixStore("ultrascale-heartbeat", store.clone())  # type: ignore[attr-defined]
        self._store.set_timeout(STORE_TIMEOUT)
        self._world = world
        self._tickets: dict[int, int] = {}
        self.beat_s = max(BEAT_S, world / BEATS_A_SECOND)

    def write(self, rank: int, status: RankStatus) -> None:
        self._store.set(str(rank), json.dumps([status.step, status.doing, status.since, status.beat]))

    def read(self, step: int) -> dict[int, RankStatus]:
        if self._ticket(step) > READERS:
            return {}
        found: dict[int, RankStatus] = {}
        for start in range(0, self._world, KEYS_PER_READ):
            keys = [str(rank) for rank in range(start, min(start + KEYS_PER_READ, self._world))]
            if not self._store.check(keys):
                keys = [key for key in keys if self._store.check([key])]
            if keys:
                statuses = (RankStatus(*json.loads(value)) for value in self._store.multi_get(keys))
                found |= dict(zip(map(int, keys), statuses, strict=True))
        return found

    def _ticket(self, step: int) -> int:
        if step not in self._tickets:
            self._tickets = {step: self._store.add(f"readers/{step}", 1)}
        return self._tickets[step]


def silent_ranks(before: Mapping[int, RankStatus], now: Mapping[int, RankStatus]) -> list[int]:
    """Ranks whose beat did not change between two reads: stopped, dead or unreachable."""
    return sorted(rank for rank, status in now.items() if rank in before and before[rank].beat == status.beat)
