"""HTML of a report: sections of text, tables and figures in one file with its style, script and Plotly inside."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from ultrascale.figures import style

if TYPE_CHECKING:
    import plotly.graph_objects as go

CSS = """
:root { --paper: %(light_paper)s; --ink: %(light_ink)s; --line: %(light_grid)s; --soft: #57606a; }
:root[data-theme=dark] { --paper: %(dark_paper)s; --ink: %(dark_ink)s; --line: %(dark_grid)s; --soft: #9aa4af; }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 %(font)s; margin: 0 auto; max-width: 1000px;
  padding: 24px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 36px 0 8px; }
p.soft, footer { color: var(--soft); }
nav { margin: 12px 0; } nav a { color: inherit; margin-right: 14px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 16px 0; }
.tile { border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; }
.tile b { display: block; font-size: 20px; } .tile span { color: var(--soft); font-size: 13px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; } caption { text-align: left; font-weight: 600; padding: 6px 0; }
th, td { border-bottom: 1px solid var(--line); padding: 4px 12px 4px 0; text-align: left; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
pre { font-size: 12px; border: 1px solid var(--line); border-radius: 8px; padding: 12px; overflow-x: auto; }
button { font: inherit; float: right; background: none; color: inherit; border: 1px solid var(--line); border-radius: 6px;
  padding: 4px 10px; cursor: pointer; }
figure { margin: 8px 0; break-inside: avoid; } .chart { width: 100%%; }
@media print { button, nav { display: none; } body { max-width: none; padding: 0; } h2 { break-after: avoid; }
  tr, .tile { break-inside: avoid; } }
"""

SCRIPT = """
const root = document.documentElement;
const charts = [...document.querySelectorAll('.chart')];
for (const chart of charts) {
  const figure = JSON.parse(document.getElementById(chart.dataset.figure).textContent);
  Plotly.newPlot(chart, figure.data, figure.layout, {responsive: true, displaylogo: false});
}
function paint(theme) {
  root.dataset.theme = theme;
  const colours = THEMES[theme];
  for (const chart of charts) {
    const change = {...colours};
    for (const name of Object.keys(chart.layout))
      if (/^[xy]axis[0-9]*$/.test(name)) for (const part of ['gridcolor', 'zerolinecolor', 'linecolor'])
        change[name + '.' + part] = GRID[theme];
    Plotly.relayout(chart, change);
  }
}
const wish = matchMedia('(prefers-color-scheme: dark)');
let chosen = wish.matches ? 'dark' : 'light';
document.querySelector('button').onclick = () => paint(chosen = chosen === 'dark' ? 'light' : 'dark');
addEventListener('beforeprint', () => paint('light'));
addEventListener('afterprint', () => paint(chosen));
paint(chosen);
"""


@dataclass(frozen=True)
class Section:
    """A heading and its content as HTML."""

    title: str
    parts: tuple[str, ...]


def words(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def bullets(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def tiles(pairs: Sequence[tuple[str, str]]) -> str:
    """Large figures: (name, value)."""
    inside = "".join(f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in pairs)
    return f'<div class="tiles">{inside}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """`numbers` are the columns that align to the right."""

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=number' if place in numbers else ''}>{escape(value)}</{tag}>" for place, value in enumerate(values)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{cells("th", head)}</tr></thead><tbody>{body}</tbody></table></div>'


def details(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def chart(figure: go.Figure, name: str) -> str:
    """The figure's data beside its place; Plotly writes `<` so that no text inside can end the script."""
    data = figure.to_json()
    height = figure.layout.height or 420
    return (
        f'<figure><div class="chart" style="height:{height}px" data-figure="{name}" role="img" '
        f'aria-label="{escape(_title(figure), quote=True)}"></div>'
        f'<script type="application/json" id="{name}">{data}</script></figure>'
    )


def _title(figure: go.Figure) -> str:
    return str(figure.layout.title.text or "figure")


def page(title: str, subtitle: str, sections: Sequence[Section], footer: str) -> str:
    from plotly.offline import get_plotlyjs

    style.graph_objects()
    ids = [f"part-{number}" for number in range(len(sections))]
    links = "".join(f'<a href="#{place}">{escape(one.title)}</a>' for place, one in zip(ids, sections, strict=True))
    body = "".join(
        f'<section><h2 id="{place}">{escape(one.title)}</h2>{"".join(one.parts)}</section>'
        for place, one in zip(ids, sections, strict=True)
    )
    themes = json.dumps({theme: _flat(theme) for theme in style.THEMES})
    return (
        f'<!doctype html>\n<html lang="en" data-theme="light"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{_css()}</style></head><body>"
        f'<button type="button" aria-label="switch between light and dark">light / dark</button>'
        f'<h1>{escape(title)}</h1><p class="soft">{escape(subtitle)}</p><nav>{links}</nav>{body}'
        f"<footer><p>{escape(footer)}</p></footer><script>{get_plotlyjs()}</script>"
        f"<script>const THEMES = {themes}, GRID = {json.dumps(style.GRID)};{SCRIPT}</script></body></html>\n"
    )


def _flat(theme: style.Theme) -> dict[str, str]:
    look = style.layout_of(theme)
    return {
        "paper_bgcolor": look["paper_bgcolor"],
        "plot_bgcolor": look["plot_bgcolor"],
        "font.color": look["font"]["color"],
    }


def _css() -> str:
    colours = {f"{theme}_paper": style.PAPER[theme] for theme in style.THEMES}
    colours |= {f"{theme}_ink": style.INK[theme] for theme in style.THEMES}
    colours |= {f"{theme}_grid": style.GRID[theme] for theme in style.THEMES}
    return CSS % {**colours, "font": style.FONT}
