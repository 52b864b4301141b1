"""Parts of every page: links, theme switch, messages, figures, tables."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from nicegui import ui

from ultrascale.figures import style
from ultrascale.specs.errors import RunError, SpecError
from ultrascale.studio.address import PlannerQuery

if TYPE_CHECKING:
    import plotly.graph_objects as go

log = logging.getLogger(__name__)
COLORS: dict[style.Theme, dict[str, str]] = {
    "light": {"ground": "#f5f6f8", "soft": "#5b6470", "line2": "#d3d8df", "accent": "#4a4ac4", "tint": "#eeeefb"},
    "dark": {"ground": "#0e1014", "soft": "#9aa4b2", "line2": "#434954", "accent": "#a5a5f7", "tint": "#24243d"},
}
for theme, colors in COLORS.items():
    colors |= {"paper": style.PAPER[theme], "ink": style.INK[theme], "line": style.GRID[theme]}
# Plotly is fetched while Vue mounts the page, not with the first figure; Back and Forward open the address they lead to.
HEAD = """<script type="module">
  const href = import.meta.resolve("nicegui-plotly");
  document.head.append(Object.assign(document.createElement("link"), { rel: "modulepreload", href }));
  addEventListener("popstate", () => location.reload());
</script>"""
PAGES = {"/": "Plan", "/explore": "Explore", "/schedules": "Schedules", "/runs": "Runs", "/accuracy": "Accuracy"}


class Frame:
    """Header, address, theme and message line of a page."""

    def __init__(self, path: str, ask: PlannerQuery) -> None:
        self.path, self.ask = path, ask
        self.edited: set[str] = set()
        self.charts: list[Chart] = []
        self.links: dict[str, ui.link] = {}
        self.client = ui.context.client
        self.dark = ui.dark_mode(ask.theme == "dark")
        ui.colors(primary=style.COLORS["this plan"], negative=style.COLORS["limit"])
        ui.add_css(stylesheet())
        ui.add_head_html(HEAD)
        self.client.on_exception(self.report)
        with ui.header().classes("us-header items-center"):
            ui.label("Ultrascale").classes("us-name")
            for target, name in PAGES.items():
                link = ui.link(name, target)
                self.links[target] = link
                if target == path:
                    link.props('aria-current="page"')
            ui.space()
            switch = ui.button(icon="contrast", on_click=self.switch).props("flat dense round")
            switch.props('aria-label="switch between light and dark" title="light / dark"')
        self.update_links()
        self.message = ui.label("").classes("us-message").props('role="alert"')

    @property
    def theme(self) -> style.Theme:
        return "dark" if self.ask.theme == "dark" else "light"

    def switch(self) -> None:
        self.changed(theme="light" if self.theme == "dark" else "dark")
        self.dark.value = self.theme == "dark"
        for chart in self.charts:
            chart.redraw()

    def changed(self, **values: str) -> None:
        """Change the address of the page; a control's first change is a step that the browser's Back button takes back."""
        self.ask = self.ask.changed(**values)
        query = self.ask.query()
        self.update_links()
        again = set(values) == self.edited or set(values) == {"theme"}
        change_address = ui.navigate.history.replace if again else ui.navigate.history.push
        self.edited = set(values)
        change_address(f"{self.path}?{query}" if query else self.path)

    def update_links(self) -> None:
        """Links to the other pages keep the address."""
        query = self.ask.query()
        for target, link in self.links.items():
            link.props(f'href="{target}?{query}"' if query else f'href="{target}"')

    @property
    def closed(self) -> bool:
        """Whether the browser has left the page."""
        return not self.client.has_socket_connection

    def say(self, text: str) -> None:
        self.message.text = text

    @contextmanager
    def show_errors(self) -> Iterator[None]:
        """Show every exception on the page; one that is not the user's goes to the log too."""
        try:
            yield
        except (SpecError, RunError) as error:
            self.say(str(error))
        except Exception as error:
            self.report(error)

    def report(self, error: Exception) -> None:
        """Show an error of the program itself, with its traceback in the log."""
        log.error("page %s?%s", self.path, self.ask.query(), exc_info=error)
        self.say(f"Internal error, {type(error).__name__}: {str(error)[:500]}\nThe traceback is in the studio's log.")


class Chart:
    """A place for a figure; empty until there is one."""

    def __init__(self, frame: Frame, marker: str, wide: bool = False) -> None:
        self.frame, self.marker = frame, marker
        self.place = ui.element("div").classes("us-figure" + (" us-wide" if wide else ""))
        self.figure: go.Figure | None = None
        self.element: ui.plotly | None = None
        frame.charts.append(self)

    def show(self, figure: go.Figure | None) -> None:
        self.figure = figure
        if figure is None:
            self.place.clear()
            self.element = None
        self.redraw()

    def redraw(self) -> None:
        if self.figure is None:
            return
        drawn = _drawn(self.figure, self.frame.theme)
        if self.element is None:
            with self.place:
                self.element = ui.plotly(drawn).classes("full-width").mark(self.marker).props(f'role="img" id="{self.marker}"')
        else:
            self.element.update_figure(drawn)


def _drawn(figure: go.Figure, theme: style.Theme) -> dict[str, Any]:
    return {**style.themed_json(figure, theme), "config": {"responsive": True, "displaylogo": False}}


@cache
def stylesheet() -> str:
    """The colours of both themes, then the rules that use them."""
    shared = {
        "font": style.FONT,
        "limit": style.COLORS["limit"],
        "communication": style.COLORS["communication"],
    }
    themes = [
        f"{place} {{ {' '.join(f'--{name}: {value};' for name, value in values.items())} }}"
        for place, values in ((":root", shared), ("body", COLORS["light"]), ("body.body--dark", COLORS["dark"]))
    ]
    return "\n".join([*themes, resources.files("ultrascale.studio").joinpath("page.css").read_text(encoding="utf-8")])


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], marker: str) -> ui.table:
    """A plain table, left-aligned."""
    columns = [{"name": str(n), "label": label, "field": str(n), "align": "left"} for n, label in enumerate(head)]
    data = [{str(n): value for n, value in enumerate(row)} for row in rows]
    grid = ui.table(columns=columns, rows=data).classes("full-width us-table").mark(marker)
    grid.props("flat dense wrap-cells hide-pagination").props(":rows-per-page-options=[0]")
    return grid
