"""HTML of a report: text, tables and figures in one file, with its style (page.css), script (page.js) and Plotly inside."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import TYPE_CHECKING

from ultrascale.figures import style

if TYPE_CHECKING:
    import plotly.graph_objects as go


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
        f"<script>const THEMES = {themes}, GRID = {json.dumps(style.GRID)};\n{_beside('page.js')}</script></body></html>\n"
    )


def _flat(theme: style.Theme) -> dict[str, str]:
    layout = style.layout_of(theme)
    return {
        "paper_bgcolor": layout["paper_bgcolor"],
        "plot_bgcolor": layout["plot_bgcolor"],
        "font.color": layout["font"]["color"],
    }


def _css() -> str:
    """The theme's colours as variables, and the rules that use them."""
    colours = {"--paper": style.PAPER, "--ink": style.INK, "--line": style.GRID}
    themes = (
        f":root[data-theme={theme}] {{ {' '.join(f'{name}: {by[theme]};' for name, by in colours.items())} }}"
        for theme in style.THEMES
    )
    return "\n".join([f":root {{ --font: {style.FONT}; }}", *themes, _beside("page.css")])


def _beside(name: str) -> str:
    return resources.files("ultrascale.report").joinpath(name).read_text(encoding="utf-8")
