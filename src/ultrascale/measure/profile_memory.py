"""Memory over one step by owner, as JSON and SVG: every change on a CPU, the allocator's record on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeVar

import torch

from ultrascale.figures.style import OWNER_COLORS
from ultrascale.parallel import torch_private
from ultrascale.specs.estimate import MEASURED_OWNERS
from ultrascale.specs.measurement import MeasuredMemory
from ultrascale.specs.units import GIB, seconds
from ultrascale.train.engine import Engine
from ultrascale.train.memory import LiveBytes, account, states

MAX_ROWS, DRAWN_ROWS = 2000, 400  # rows that are kept, and that a picture shows
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BASE = 860, 420, 80, 840, 50, 340

Row = tuple[float, ...]
"""seconds since the step began, then bytes by owner"""


@dataclass(frozen=True)
class MemoryTimeline:
    owners: tuple[str, ...]
    rows: tuple[Row, ...]
    how: str
    """how it was measured"""
    snapshot: Any = None
    """PyTorch's snapshot of the step, where there is one"""

    @property
    def peak(self) -> Row:
        return max(self.rows, key=lambda row: sum(row[1:]), default=(0.0, *(0.0 for _ in self.owners)))

    def as_json(self, capacity: float | None = None) -> dict[str, Any]:
        """A row of `bytes` for each of `time_s`, in the order of `owners`."""
        peak = self.peak
        return {
            "owners": list(self.owners),
            "seen": self.how,
            "capacity_bytes": capacity,
            "peak": {"time_s": peak[0], "bytes": sum(peak[1:]), **dict(zip(self.owners, peak[1:], strict=True))},
            "time_s": [round(row[0], 9) for row in self.rows],
            "bytes": [list(row[1:]) for row in self.rows],
        }


def thinned(rows: Sequence[Row], most: int = MAX_ROWS) -> tuple[Row, ...]:
    """About `most` rows: the first, and of neighbours the one with most bytes, so that the peak stays."""
    if len(rows) <= most:
        return tuple(rows)
    each = -(-len(rows) // most)
    groups = (rows[place : place + each] for place in range(0, len(rows), each))
    return (rows[0], *(max(group, key=lambda row: sum(row[1:])) for group in groups))


def draw(timeline: MemoryTimeline, title: str, capacity: float | None = None) -> str:
    """An SVG of owners stacked over time, parameters at the bottom; the capacity is a line where it is near the peak."""
    rows = thinned(timeline.rows, DRAWN_ROWS)
    peak = sum(timeline.peak[1:])
    shows = capacity is not None and capacity <= 4 * peak
    top = max(peak, capacity if shows and capacity is not None else 0.0, 1.0) * 1.05
    last = max((row[0] for row in rows), default=0.0) or 1.0

    def x(time_s: float) -> float:
        return LEFT + time_s / last * (RIGHT - LEFT)

    def y(size: float) -> float:
        return BASE - size / top * (BASE - TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="15">{escape(title, quote=False)}</text>',
        f'<text x="{LEFT}" y="37" fill="#666">peak {_size(peak)} after {seconds(timeline.peak[0])}; {timeline.how}</text>',
    ]
    below = [0.0] * len(rows)
    for place, owner in enumerate(timeline.owners):
        above = [low + row[1 + place] for low, row in zip(below, rows, strict=True)]
        if any(row[1 + place] for row in rows):
            parts.append(
                f'<path d="{_area(rows, below, above, x, y, last)}" fill="{OWNER_COLORS[owner]}"><title>{owner}</title></path>'
            )
        below = above
    parts += _axes(top, last, x, y)
    if shows and capacity is not None:
        line = y(capacity)
        parts.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{line:.1f}" y2="{line:.1f}" stroke="black" stroke-dasharray="6 4"/>')
        parts.append(f'<text x="{RIGHT}" y="{line - 5:.1f}" text-anchor="end">capacity {_size(capacity)}</text>')
    for place, owner in enumerate(timeline.owners):
        left = LEFT + place * 120
        parts.append(f'<rect x="{left}" y="{HEIGHT - 22}" width="12" height="12" fill="{OWNER_COLORS[owner]}"/>')
        parts.append(f'<text x="{left + 16}" y="{HEIGHT - 12}">{owner}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _area(rows: Sequence[Row], below: list[float], above: list[float], x: Any, y: Any, last: float) -> str:
    """Steps, not slopes: bytes are held until they change."""
    ends = [row[0] for row in rows[1:]] + [last]
    upper = [f"{x(at):.1f},{y(high):.1f}" for row, end, high in zip(rows, ends, above, strict=True) for at in (row[0], end)]
    lower = [f"{x(at):.1f},{y(low):.1f}" for row, end, low in zip(rows, ends, below, strict=True) for at in (row[0], end)]
    return "M" + " L".join([*upper, *reversed(lower)]) + " Z"


def _axes(top: float, last: float, x: Any, y: Any) -> list[str]:
    parts = [f'<path d="M{LEFT},{TOP} V{BASE} H{RIGHT}" fill="none" stroke="black"/>']
    for share in (0.25, 0.5, 0.75, 1.0):
        level = y(top * share)
        parts.append(f'<line x1="{LEFT - 4}" x2="{LEFT}" y1="{level:.1f}" y2="{level:.1f}" stroke="black"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{level + 4:.1f}" text-anchor="end">{_size(top * share)}</text>')
        anchor = "end" if share == 1 else "middle"
        parts.append(f'<text x="{x(last * share):.1f}" y="{BASE + 16}" text-anchor="{anchor}">{seconds(last * share)}</text>')
    parts.append(f'<text x="{(LEFT + RIGHT) / 2}" y="{BASE + 34}" text-anchor="middle">time in the step</text>')
    return parts


def _size(value: float) -> str:
    return f"{value / GIB:,.2f} GiB" if value >= GIB / 10 else f"{value / 2**20:,.2f} MiB"


MAX_EVENTS = 1_000_000  # of the allocator's events in one step, the last so many
TRACKED = "while every tensor was followed, which slows a step down"
RECORD = "from the allocator's record; what is no state counts as activations"

T = TypeVar("T")


def track_step(engine: Engine, step: Callable[[], T]) -> tuple[MeasuredMemory, T, MemoryTimeline]:
    """Run a step and record its memory."""
    return _on_cpu(engine, step) if engine.mesh.device.type == "cpu" else _on_gpu(engine, step)


class _Recorder(LiveBytes):  # type: ignore[no-untyped-call]
    """Live bytes, recorded whenever they change."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[float, ...]] = []
        self._began: float | None = None

    def begin(self) -> None:
        self._began = time.perf_counter()
        self._write()

    def _resize(self, living: Any, size: int) -> None:
        before = self.current
        super()._resize(living, size)
        if self._began is not None and self.current != before:
            self._write()

    def _write(self) -> None:
        assert self._began is not None
        by_owner = self._by_owner
        self.rows.append((time.perf_counter() - self._began, *(by_owner.get(owner, 0) for owner in MEASURED_OWNERS)))


def _on_cpu(engine: Engine, step: Callable[[], T]) -> tuple[MeasuredMemory, T, MemoryTimeline]:
    live = _Recorder()

    def recording_step() -> T:
        live.begin()
        return step()

    memory, result = account(engine, recording_step, live)
    return memory, result, MemoryTimeline(MEASURED_OWNERS, thinned(live.rows), TRACKED)


def _on_gpu(engine: Engine, step: Callable[[], T]) -> tuple[MeasuredMemory, T, MemoryTimeline]:
    device = engine.mesh.device
    before = _addresses(states(engine), device)
    base = torch.cuda.memory_allocated(device)
    torch_private.record_memory_history(stacks="python", max_entries=MAX_EVENTS)
    memory, result = account(engine, step)
    snapshot = torch_private.memory_snapshot(device)
    torch_private.record_memory_history(enabled=None)
    after = _addresses(states(engine), device)
    index = device.index if device.index is not None else torch.cuda.current_device()
    events = snapshot["device_traces"][index] if snapshot["device_traces"] else []
    rows = from_record(events, before, after, base)
    return memory, result, MemoryTimeline(MEASURED_OWNERS, thinned(rows), RECORD, snapshot)


Addresses = Mapping[int, tuple[str, int]]
"""owner and size of the memory at an address"""


def _addresses(owned: Mapping[str, Iterable[torch.Tensor]], device: torch.device) -> dict[int, tuple[str, int]]:
    found = {}
    for owner, tensors in owned.items():
        for tensor in tensors:
            if tensor.device == device:
                storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
                found[storage.data_ptr()] = (owner, storage.nbytes())
    return found


def from_record(events: Iterable[Mapping[str, Any]], before: Addresses, after: Addresses, base: int) -> list[tuple[float, ...]]:
    """Rows of time and bytes by owner. `before`, `after`: states around the step; `base`: bytes allocated at its start."""
    by_owner = dict.fromkeys(MEASURED_OWNERS, 0)
    for owner, size in before.values():
        by_owner[owner] += size
    by_owner["activations"] += max(0, base - sum(by_owner.values()))
    living = dict(before)
    rows: list[tuple[float, ...]] = []
    began: float | None = None
    for event in events:
        action, address, size = event["action"], event["addr"], event["size"]
        if action not in ("alloc", "free_completed"):
            continue
        if action == "alloc":
            owner = after[address][0] if address in after else "activations"
            living[address] = (owner, size)
            by_owner[owner] += size
        else:
            owner, size = living.pop(address, ("activations", size))
            by_owner[owner] = max(0, by_owner[owner] - size)
        now = event.get("time_us", len(rows)) / 1e6
        began = now if began is None else began
        rows.append((now - began, *by_owner.values()))
    return rows
