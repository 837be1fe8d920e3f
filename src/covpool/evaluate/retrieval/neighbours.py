"""Some queries and what was found for them, as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from covpool.drawing.lettering import drawn, text_style
from covpool.drawing.theme import Theme, new_figure
from covpool.evaluate.retrieval.scores import Scores
from covpool.train.report.thumbnails import squared

QUERIES = 10
LETTERS = 24
# In inches: a picture with its frame, with what is below and beside it, and what is around them all.
SIDE, CELL, MARGIN, TOP = 1.6, (1.75, 2.05), 0.12, 0.4
# Columns, for the title to have room.
FEWEST = 5
TITLE = "query, and the nearest images; above the queries of the lowest average precision (AP), below others"
# Frames of what is of the query's class and what is not: also of different lightness, for all eyes.
RIGHT, WRONG = "#1f9d45", "#a61b1b"


class Found(NamedTuple):
    """An image: the name of its class, and the picture, if it could be had."""

    label: str
    picture: Image.Image | None


Row = tuple[Found, float, Sequence[Found]]


def chosen_queries(scores: Scores, most: int = QUERIES) -> list[int]:
    """Half of them those with the worst average precision, worst first; the others spread over the set."""
    counted = np.flatnonzero(scores.counted)
    worst = counted[np.argsort(scores.best_known_precision[counted], kind="stable")[: (most + 1) // 2]]
    others = np.setdiff1d(counted, worst)
    wanted = min(most - len(worst), len(others))
    # The middles of equal parts, so that neither the first class nor the last is always among them.
    spread = others[((np.arange(wanted) + 0.5) * len(others) / max(wanted, 1)).astype(int)]
    return [*worst.tolist(), *spread.tolist()]


def draw_neighbours(rows: Sequence[Row], theme: Theme) -> Figure:
    """A row for each query: the image, and to its right what is nearest, framed by whether it matches.

    Args:
        rows: the query, its average precision, and its neighbours.
        theme: the colours.
    """
    columns = max(FEWEST, 1 + max(len(found) for _, _, found in rows))
    width, height = columns * CELL[0] + MARGIN, len(rows) * CELL[1] + TOP
    figure = new_figure(theme, width, height)
    figure.set_layout_engine("none")
    # One for all: axes of their own for each picture would take seconds to lay out.
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    axes.text(MARGIN, TOP / 2, TITLE, va="center", fontsize=10, color=theme.faint)
    for line, (query, precision, found) in enumerate(rows):
        y = TOP + line * CELL[1]
        _draw(axes, MARGIN, y, query, theme.ink, theme)
        axes.text(MARGIN, y + SIDE + 0.3, f"AP {precision:.2f}", fontsize=7.5, color=theme.faint)
        for column, one in enumerate(found, start=1):
            colour = RIGHT if one.label == query.label else WRONG
            _draw(axes, MARGIN + column * CELL[0], y, one, colour, theme)
    return figure


def _draw(axes: Axes, x: float, y: float, found: Found, colour: str, theme: Theme) -> None:
    """The picture with its upper left corner at a place, a frame, and its class below."""
    picture = Image.new("RGB", (2, 2), "gray") if found.picture is None else found.picture
    extent = (x, x + SIDE, y + SIDE, y)
    axes.imshow(squared(picture, theme.grid), extent=extent, aspect="auto")
    axes.add_patch(Rectangle((x, y), SIDE, SIDE, fill=False, edgecolor=colour, linewidth=3))
    label = drawn(found.label, "(no font for its name)", LETTERS)
    axes.text(x, y + SIDE + 0.16, label, fontsize=7.5, color=colour, **text_style())
