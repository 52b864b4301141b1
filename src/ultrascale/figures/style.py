"""The look of every figure: colours, light and dark theme, axes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from ultrascale.specs.errors import SpecError
from ultrascale.specs.estimate import OWNERS

if TYPE_CHECKING:
    import plotly.graph_objects as go

Theme = Literal["light", "dark"]
THEMES: tuple[Theme, ...] = ("light", "dark")

# Okabe and Ito 2008, "Color Universal Design".
ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PINK, GREY = (
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#F0E442",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
    "#999999",
)
# One meaning per colour, in every figure. Shades of one hue, told apart by lightness, are parts of one thing: greens are model
# states, blues are computing.
COLORS = {
    "parameters": "#00664B",
    "master": GREEN,
    "gradients": "#5CC4A4",
    "optimizer": "#B5E3D3",
    "activations": ORANGE,
    "buffers": YELLOW,
    "runtime": GREY,
    "forward": "#A8D8F5",
    "backward": SKY,
    "weight gradient": "#3D8FC4",
    "computing": BLUE,
    "communication": PINK,
    "host": "#6B7280",
    "limit": RED,
    "this plan": "#5B5BD6",
    "other layouts": "#8C96A3",
    "predicted": "#B4BECB",
    "measured": "#66758A",
}
OWNER_COLORS = {owner: COLORS[owner] for owner in OWNERS}
# The bubble is a hatched gap, not a colour.
BUBBLE = {"color": "rgba(128,128,128,0.14)", "pattern": {"shape": "/", "fgcolor": "rgba(128,128,128,0.55)", "size": 6}}
# Runs, GPU kinds, techniques: names without a meaning of their own. Paul Tol 2021, "Colour Schemes", bright.
SERIES = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#BBBBBB")
SHAPES = ("circle", "square", "diamond", "cross", "triangle-up", "star", "x", "hexagon")
FONT = "Roboto, system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
PAPER = {"light": "#ffffff", "dark": "#16181d"}
INK = {"light": "#1f2328", "dark": "#e6e8eb"}
GRID = {"light": "#e3e6ea", "dark": "#31353d"}


def graph_objects() -> Any:
    """plotly.graph_objects, or an error that says what to install."""
    try:
        import plotly.graph_objects as objects
    except ImportError as error:
        raise SpecError("figures are drawn with Plotly, which is not installed: pip install 'ultrascale[report]'") from error
    return objects


def new_figure(title: str, x: str = "", y: str = "", height: int = 420) -> go.Figure:
    """An empty figure with its title and axis titles, which contain the units."""
    # In one call: updating an existing figure costs Plotly several times as much.
    layout = {
        "title": {"text": title, "x": 0.01, "xanchor": "left", "y": 0.98, "yanchor": "top", "font": {"size": 15}},
        "xaxis": {**_axis("light"), "title": {"text": x or None, "font": {"size": 13}}},
        "yaxis": {**_axis("light"), "title": {"text": y or None, "font": {"size": 13}}},
        "height": height,
        "margin": {"l": 64, "r": 24, "t": 56, "b": 104},
        "legend": {
            "orientation": "h",
            "yref": "container",
            "yanchor": "bottom",
            "y": 0,
            "x": 0,
            "traceorder": "normal",
            "font": {"size": 12},
        },
        "bargap": 0.25,
    }
    return graph_objects().Figure(layout={**layout, **layout_of("light")})


def themed(figure: go.Figure, theme: Theme) -> go.Figure:
    """The same figure in the colours of a theme."""
    figure.update_layout(**layout_of(theme))
    for axes in (figure.update_xaxes, figure.update_yaxes):
        axes(**_axis(theme))
    return figure


def themed_json(figure: go.Figure, theme: Theme) -> dict[str, Any]:
    """The figure as JSON data in the colours of a theme, without changing the figure."""
    data: dict[str, Any] = figure.to_plotly_json()
    layout, colours = data["layout"], layout_of(theme)
    for name in ("paper_bgcolor", "plot_bgcolor"):
        layout[name] = colours[name]
    layout["font"] = {**layout.get("font", {}), **colours["font"]}
    for name in [name for name in layout if name.startswith(("xaxis", "yaxis"))]:
        layout[name] = {**layout[name], **_axis(theme)}
    return data


def _axis(theme: Theme) -> dict[str, Any]:
    return {"gridcolor": GRID[theme], "zerolinecolor": GRID[theme], "linecolor": GRID[theme], "automargin": True}


def layout_of(theme: Theme) -> dict[str, Any]:
    """The part of a layout that differs between the themes."""
    if theme not in THEMES:
        raise SpecError(f"theme is '{theme!s:.20}' but must be light or dark")
    return {
        "template": "none",
        "paper_bgcolor": PAPER[theme],
        "plot_bgcolor": PAPER[theme],
        "font": {"family": FONT, "size": 13, "color": INK[theme]},
        "hoverlabel": {"font": {"family": FONT}},
    }


def mark_level(figure: go.Figure, level: float, text: str, axis: str = "y") -> None:
    """A dashed horizontal line, such as a capacity, with a label above its right end."""
    line = {"color": COLORS["limit"], "width": 2, "dash": "dash"}
    figure.add_shape(type="line", xref="paper", x0=0, x1=1, yref=axis, y0=level, y1=level, line=line)
    figure.add_annotation(
        x=1,
        xref="paper",
        xanchor="right",
        yref=axis,
        y=level,
        yanchor="bottom",
        text=text,
        showarrow=False,
        font={"color": COLORS["limit"]},
    )


def log_ticks(low: float, high: float, unit: str = "") -> dict[str, Any]:
    """A logarithmic axis with round ticks: decades, or 1, 2 and 5 of each, or even steps where the range is narrow."""
    room = 0.04 * max(math.log10(high / low), 0.1)
    ends = math.log10(low) - room, math.log10(high) + room
    powers = range(math.floor(ends[0]), math.ceil(ends[1]) + 1)
    if high / low < 7:  # 1, 2 and 5 may leave a single tick there
        first, last = 10 ** ends[0], 10 ** ends[1]
        step = 10.0 ** math.floor(math.log10((last - first) / 2)) / 2
        step *= next(times for times in (1, 2, 4, 10, 20) if last - first <= 6 * step * times)
        values = [step * place for place in range(math.ceil(first / step), math.floor(last / step) + 1)]
    else:
        few = [10.0**power for power in powers if ends[0] <= power <= ends[1]]
        every = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
        values = few if len(few) > 2 else [value for value in every if ends[0] <= math.log10(value) <= ends[1]]
    texts = [f"{_short(value)}{unit}" for value in values]
    return {"type": "log", "range": list(ends), "tickvals": values, "ticktext": texts}


def _short(value: float) -> str:
    """`500`, `2k`, `0.05`."""
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"
