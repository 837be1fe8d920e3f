"""The colours of figures, on a light page and on a dark one, and how they become bytes."""

from __future__ import annotations

import io
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Theme:
    """Colours; those of series can be told apart with any colour vision.

    Attributes:
        paper: behind the figure.
        ink: of the text.
        faint: of lesser text and lines.
        grid: of the lines across a plot.
        series: of the lines of a plot, by their order.
        right: the colour map of right answers.
        wrong: the colour map of errors.
    """

    paper: str
    ink: str
    faint: str
    grid: str
    series: tuple[str, str]
    right: tuple[str, str]
    wrong: tuple[str, str]


LIGHT = Theme(
    paper="#ffffff",
    ink="#1f2328",
    faint="#656d76",
    grid="#e9edf1",
    series=("#0b6bb8", "#d1570a"),
    right=("#eaf3fb", "#0b6bb8"),
    wrong=("#fdeee2", "#c2410c"),
)
DARK = Theme(
    paper="#171b21",
    ink="#e6e9ed",
    faint="#9aa4af",
    grid="#262c34",
    series=("#5cb2f2", "#f59e5b"),
    right=("#1b2a38", "#4aa3e6"),
    wrong=("#35261d", "#ef8a45"),
)


def new_figure(theme: Theme, width: float, height: float) -> Figure:
    """An empty figure, in inches, which no other code knows of."""
    return Figure(figsize=(width, height), layout="constrained", facecolor=theme.paper)


def dress(axes: Axes, theme: Theme) -> None:
    """Axes in the colours of the theme, with no more lines than help the eye."""
    axes.set_facecolor(theme.paper)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(theme.faint)
    axes.tick_params(colors=theme.faint, labelcolor=theme.ink, labelsize=9)
    axes.grid(color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)


def png(figure: Figure, dpi: int = 150) -> bytes:
    """The figure as a file, the same for the same figure."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=dpi, metadata={"Software": None})
    return stream.getvalue()
