"""Memory over one step as a picture (SVG) and as JSON. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ultrascale.specs.units import GIB, seconds

MOST, DRAWN = 2000, 400  # rows that are kept, and that a picture shows

# Okabe and Ito's palette: told apart by readers with any colour vision.
COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#D55E00", "#999999")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BASE = 860, 420, 80, 840, 50, 340

Row = tuple[float, ...]
"""seconds since the step began, then bytes by owner"""


@dataclass(frozen=True)
class MemoryTimeline:
    owners: tuple[str, ...]
    rows: tuple[Row, ...]
    how: str
    """how it was seen"""

    @property
    def peak(self) -> Row:
        return max(self.rows, key=lambda row: sum(row[1:]), default=(0.0, *(0.0 for _ in self.owners)))

    def as_json(self, capacity: float | None = None) -> dict[str, Any]:
        """A row of `bytes` per moment of `time_s`, in the order of `owners`."""
        peak = self.peak
        return {
            "owners": list(self.owners),
            "seen": self.how,
            "capacity_bytes": capacity,
            "peak": {"time_s": peak[0], "bytes": sum(peak[1:]), **dict(zip(self.owners, peak[1:], strict=True))},
            "time_s": [round(row[0], 9) for row in self.rows],
            "bytes": [list(row[1:]) for row in self.rows],
        }


def thinned(rows: Sequence[Row], most: int = MOST) -> tuple[Row, ...]:
    """About so many rows: the first, and of neighbours the one with most bytes, so that the peak stays."""
    if len(rows) <= most:
        return tuple(rows)
    each = -(-len(rows) // most)
    groups = (rows[place : place + each] for place in range(0, len(rows), each))
    return (rows[0], *(max(group, key=lambda row: sum(row[1:])) for group in groups))


def draw(timeline: MemoryTimeline, title: str, capacity: float | None = None) -> str:
    """Owners stacked over time, parameters at the bottom; the capacity as a line where it is near enough to show."""
    rows = thinned(timeline.rows, DRAWN)
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
        f'<text x="{LEFT}" y="20" font-size="15">{_plain(title)}</text>',
        f'<text x="{LEFT}" y="37" fill="#666">peak {_size(peak)} after {seconds(timeline.peak[0])}; {timeline.how}</text>',
    ]
    below = [0.0] * len(rows)
    for place, owner in enumerate(timeline.owners):
        above = [low + row[1 + place] for low, row in zip(below, rows, strict=True)]
        if any(row[1 + place] for row in rows):
            parts.append(
                f'<path d="{_area(rows, below, above, x, y, last)}" fill="{COLOURS[place]}"><title>{owner}</title></path>'
            )
        below = above
    parts += _axes(top, last, x, y)
    if shows and capacity is not None:
        line = y(capacity)
        parts.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{line:.1f}" y2="{line:.1f}" stroke="black" stroke-dasharray="6 4"/>')
        parts.append(f'<text x="{RIGHT}" y="{line - 5:.1f}" text-anchor="end">capacity {_size(capacity)}</text>')
    for place, owner in enumerate(timeline.owners):
        left = LEFT + place * 120
        parts.append(f'<rect x="{left}" y="{HEIGHT - 22}" width="12" height="12" fill="{COLOURS[place]}"/>')
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


def _plain(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
