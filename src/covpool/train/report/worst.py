"""The errors that a model was surest of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from covpool.drawing.lettering import drawn, text_style
from covpool.drawing.theme import Theme, new_figure
from covpool.train.report.thumbnails import Tile, squared

COLUMNS = 6
LETTERS = 22


def draw_worst(tiles: Sequence[Tile], theme: Theme) -> Figure:
    """Images in rows, each with what it is, what it was taken for, and how surely."""
    rows = max(1, -(-len(tiles) // COLUMNS))
    columns = min(COLUMNS, max(len(tiles), 3))
    figure = new_figure(theme, 2.1 * columns, 2.75 * rows)
    places = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in places:
        axes.set_axis_off()
    for axes, tile in zip(places, tiles, strict=False):
        _draw_tile(axes, tile, theme)
    if not tiles:
        figure.text(0.5, 0.5, "no errors", ha="center", va="center", color=theme.ink, fontsize=14)
    return figure


def _draw_tile(axes: Axes, tile: Tile, theme: Theme) -> None:
    if tile.picture is None:
        axes.imshow(np.full((2, 2, 3), 0.5), interpolation="nearest")
        axes.text(0.5, 0.5, "no picture", ha="center", color="white", transform=axes.transAxes, fontsize=8)
    else:
        axes.imshow(squared(tile.picture, theme.grid), interpolation="lanczos")
    lines = (
        (f"is {drawn(tile.label, '(no font for its name)', LETTERS)}", theme.ink),
        (f"taken for {drawn(tile.predicted, '(no font for its name)', LETTERS)}", theme.series[1]),
        (f"{100 * tile.confidence:.1f} % sure", theme.faint),
    )
    for place, (words, colour) in enumerate(lines):
        axes.annotate(
            words,
            (0, 0),
            xytext=(0, -9 - 10 * place),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=7.5,
            color=colour,
            **text_style(),
        )
