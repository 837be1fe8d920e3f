"""Some queries and what was found for them, as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from covpool.evaluate.retrieval.scores import Scores
from covpool.train.report.lettering import drawn, text_style
from covpool.train.report.theme import Theme, new_figure
from covpool.train.report.thumbnails import squared

QUERIES = 10
LETTERS = 22
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
    figure = new_figure(theme, 1.75 * columns, 2.05 * len(rows) + 0.5)
    places = figure.subplots(len(rows), columns, squeeze=False)
    for axes in places.ravel():
        axes.set_axis_off()
    for (query, precision, found), line in zip(rows, places, strict=True):
        _draw(line[0], query, theme.ink, theme, f"AP {precision:.2f}")
        for one, axes in zip(found, line[1:], strict=False):
            _draw(axes, one, RIGHT if one.label == query.label else WRONG, theme)
    figure.suptitle(TITLE, x=0.005, ha="left", fontsize=10, color=theme.faint)
    return figure


def _draw(axes: Axes, found: Found, colour: str, theme: Theme, note: str = "") -> None:
    if found.picture is None:
        axes.imshow(np.full((2, 2, 3), 0.5), extent=(0, 1, 0, 1), interpolation="nearest")
    else:
        picture = squared(found.picture, theme.grid)
        axes.imshow(picture, extent=(0, 1, 0, 1), interpolation="lanczos")
    axes.add_patch(Rectangle((0, 0), 1, 1, fill=False, edgecolor=colour, linewidth=4))
    lines = ((drawn(found.label, "(no font for its name)", LETTERS), colour), (note, theme.faint))
    for place, (words, shade) in enumerate(lines):
        axes.annotate(
            words,
            (0, 0),
            xytext=(0, -10 - 10 * place),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=7.5,
            color=shade,
            **text_style(),
        )
