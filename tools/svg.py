"""Pictures of the documents as hand-written SVG: a sheet, stacked bars, curves. Paper and ink follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ultrascale.figures import style

WIDTH, LEFT, RIGHT, TOP = 800, 64, 16, 56
PLOT = 250  # pixels of a chart between its axes
TICKS = 5

_THEME = " ".join(
    f".{name} {{ fill: {colours['light']}; }} .{name}-line {{ stroke: {colours['light']}; }}"
    for name, colours in (("paper", style.PAPER), ("ink", style.INK), ("grid", style.GRID))
)
_DARK = " ".join(
    f".{name} {{ fill: {colours['dark']}; }} .{name}-line {{ stroke: {colours['dark']}; }}"
    for name, colours in (("paper", style.PAPER), ("ink", style.INK), ("grid", style.GRID))
)
STYLE = f"<style>{_THEME} @media (prefers-color-scheme: dark) {{ {_DARK} }}</style>"


class Sheet:
    """Paper with a title; what is drawn on it is kept in order."""

    def __init__(self, title: str, height: int) -> None:
        self.height = height
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'font-family="sans-serif" font-size="12">',
            f"<title>{escape(title)}</title>",
            STYLE,
            f'<rect class="paper" width="{WIDTH}" height="{height}" rx="6"/>',
        ]
        self.text(LEFT - 48, 24, title, size=15)

    def text(self, x: float, y: float, words: str, anchor: str = "start", size: int = 12, fill: str = "") -> None:
        colour = f'fill="{fill}"' if fill else 'class="ink"'
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" {colour}>{escape(words)}</text>'
        )

    def rect(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"/>')

    def line(self, points: Sequence[tuple[float, float]], colour: str = "", dashed: bool = False, width: float = 1) -> None:
        """Without a colour, a line of the grid."""
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        stroke = f'stroke="{colour}"' if colour else 'class="grid-line"'
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        self.parts.append(f'<polyline points="{places}" fill="none" {stroke} stroke-width="{width:g}"{dash}/>')

    def legend(self, y: float, colours: Mapping[str, str]) -> None:
        x = float(LEFT)
        for name, colour in colours.items():
            self.rect(x, y - 10, 12, 12, colour)
            self.text(x + 16, y, name)
            x += 30 + 6.6 * len(name)

    def done(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"


@dataclass(frozen=True)
class Bar:
    name: str
    parts: Mapping[str, float]
    above: str
    under: str = ""


def stacked(
    title: str, bars: Sequence[Bar], colours: Mapping[str, str], unit: str, mark: tuple[float, str] | None = None
) -> str:
    """Bars of parts, in the order of `colours`; `mark` is a level with its words, such as a capacity."""
    sheet, base = Sheet(title, TOP + PLOT + 76), TOP + PLOT
    top = 1.06 * max(*(sum(bar.parts.values()) for bar in bars), mark[0] if mark else 0.0)
    _levels(sheet, base, top, unit)
    room = (WIDTH - LEFT - RIGHT) / len(bars)
    for place, bar in enumerate(bars):
        x, level, width = LEFT + (place + 0.15) * room, float(base), 0.7 * room
        for part, colour in colours.items():
            height = bar.parts.get(part, 0.0) / top * PLOT
            level -= height
            if height > 0:
                sheet.rect(x, level, width, height, colour)
        middle = x + width / 2
        sheet.text(middle, level - 5, bar.above, "middle", 11)
        sheet.text(middle, base + 16, bar.name, "middle")
        sheet.text(middle, base + 31, bar.under, "middle", 11)
    if mark:
        level = base - mark[0] / top * PLOT
        sheet.line([(LEFT, level), (WIDTH - RIGHT, level)], style.COLORS["limit"], dashed=True)
        sheet.text(WIDTH - RIGHT, level - 4, mark[1], "end", fill=style.COLORS["limit"])
    sheet.legend(base + 62, {name: colour for name, colour in colours.items() if any(bar.parts.get(name) for bar in bars)})
    return sheet.done()


def _levels(sheet: Sheet, base: float, top: float, unit: str) -> None:
    step = _round_step(top / TICKS)
    for number in range(int(top / step) + 1):
        y = base - number * step / top * PLOT
        sheet.line([(LEFT, y), (WIDTH - RIGHT, y)])
        sheet.text(LEFT - 6, y + 4, f"{number * step:,.10g}", "end", 11)
    sheet.text(LEFT - 48, TOP - 12, unit, size=11)


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * nice for nice in (1, 2, 5, 10) if power * nice >= rough)


def curves(
    title: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    x_unit: str,
    y_unit: str,
    ticks: Mapping[float, str],
    mark: tuple[float, str] | None = None,
    level: tuple[float, str] | None = None,
    top: float | None = None,
) -> str:
    """Lines over a logarithmic axis; `mark` is a place on it, `level` a height, each with its words."""
    sheet, base = Sheet(title, TOP + PLOT + 82), TOP + PLOT
    top = top or 1.06 * max(y for points in series.values() for _, y in points)
    low, high = math.log(min(ticks)), math.log(max(ticks))

    def across(x: float) -> float:
        return LEFT + 10 + (math.log(x) - low) / (high - low) * (WIDTH - LEFT - RIGHT - 40)

    _levels(sheet, base, top, y_unit)
    for x, words in ticks.items():
        sheet.text(across(x), base + 16, words, "middle", 11)
    sheet.text((WIDTH + LEFT) / 2, base + 34, x_unit, "middle")
    colours = dict(zip(series, style.SERIES, strict=False))
    for name, points in series.items():
        visible_points = [(across(x), base - y / top * PLOT) for x, y in points if y <= top]
        sheet.line(visible_points, colours[name], width=2)
        for x, y in visible_points:
            sheet.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colours[name]}"/>')
    if mark:
        sheet.line([(across(mark[0]), TOP), (across(mark[0]), base)], style.GREY, dashed=True)
        sheet.text(across(mark[0]) + 4, TOP + 10, mark[1], size=11)
    if level:
        y = base - level[0] / top * PLOT
        sheet.line([(LEFT, y), (WIDTH - RIGHT, y)], style.COLORS["limit"], dashed=True)
        sheet.text(WIDTH - RIGHT, y - 4, level[1], "end", fill=style.COLORS["limit"])
    sheet.legend(base + 64, colours)
    return sheet.done()
