"""How well each class is recognised, the hardest first."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from covpool.drawing.lettering import drawn, text_style
from covpool.drawing.theme import Theme, dress, new_figure
from covpool.train.report.intervals import wilson
from covpool.train.report.per_class import ClassRow

# More could not be read.
SHOWN = 40
LETTERS = 30


def draw_classes(rows: Sequence[ClassRow], theme: Theme) -> Figure:
    """A line for each class: its recall with a 95 % interval (Wilson), its precision, and how many images."""
    there = [
        (row, drawn(row.name, f"class {number}", LETTERS)) for number, row in enumerate(rows) if row.images
    ]
    shown = sorted(there, key=lambda pair: (pair[0].recall, pair[0].name))[:SHOWN]
    figure = new_figure(theme, 7.2, 1.3 + 0.24 * max(len(shown), 4))
    axes = figure.subplots()
    dress(axes, theme)
    axes.grid(visible=False, axis="y")
    _draw_rows(axes, [row for row, _ in shown], theme)
    names = [f"{name}  ({row.images:,})" for row, name in shown]
    axes.set_yticks(range(len(names)), names, **{**text_style(), "color": theme.ink, "fontsize": 9})
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(-2, 102)
    axes.set_xlabel("recall and precision, %", color=theme.faint)
    if len(there) > SHOWN:
        axes.set_ylabel(f"the {SHOWN} hardest of {len(there):,} classes", color=theme.faint)
    return figure


def _draw_rows(axes: Axes, rows: Sequence[ClassRow], theme: Theme) -> None:
    places = range(len(rows))
    ends = [wilson(round(row.recall * row.images), row.images) for row in rows]
    axes.hlines(
        places,
        [100 * low for low, _ in ends],
        [100 * high for _, high in ends],
        color=theme.series[0],
        alpha=0.35,
        linewidth=4,
    )
    recall = [100 * row.recall for row in rows]
    axes.plot(recall, places, "o", color=theme.series[0], markersize=5, label="recall, with 95 % interval")
    precision = [100 * row.precision for row in rows]  # where it is NaN, nothing is drawn
    axes.plot(precision, places, "D", color=theme.series[1], markersize=4, label="precision")
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, labelcolor=theme.ink, fontsize=9
    )
