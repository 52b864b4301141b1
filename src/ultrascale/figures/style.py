"""The look of every figure: colours, light and dark theme, axes."""

from __future__ import annotations

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
# Colours and shapes of lines and points, used in turn.
SERIES = (BLUE, ORANGE, GREEN, RED, PINK, SKY, YELLOW, GREY)
SHAPES = ("circle", "square", "diamond", "cross", "triangle-up", "star", "x", "hexagon")
OWNER_COLORS = dict(zip(OWNERS, (BLUE, SKY, GREEN, YELLOW, ORANGE, PINK, GREY), strict=True))
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
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
        "title": {"text": title, "x": 0.01, "xanchor": "left", "y": 0.98, "yanchor": "top", "font": {"size": 16}},
        "xaxis": {**_axis("light"), "title": {"text": x or None}},
        "yaxis": {**_axis("light"), "title": {"text": y or None}},
        "height": height,
        "margin": {"l": 64, "r": 24, "t": 56, "b": 104},
        "legend": {"orientation": "h", "yref": "container", "yanchor": "bottom", "y": 0, "x": 0, "traceorder": "normal"},
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


def mark_level(figure: go.Figure, level: float, text: str) -> None:
    """A dashed horizontal line, such as a capacity, with a label above its right end."""
    figure.add_hline(y=level, line={"color": RED, "width": 2, "dash": "dash"})
    figure.add_annotation(
        x=1, xref="paper", xanchor="right", y=level, yanchor="bottom", text=text, showarrow=False, font={"color": RED}
    )
