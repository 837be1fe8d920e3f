"""Write the files of a retrieval run: a table of the queries, a picture of some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from covpool.drawing import LIGHT, Theme, drawn, new_figure, png, text_style
from covpool.durable import replace_file
from covpool.evaluate.search import Scores, Side
from covpool.train.report.thumbnails import squared, thumbnail
from covpool.train.run_folder import RunFolder, csv_bytes

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


COLUMNS = ("name", "label", "matches", "first_match", "average_precision", "at_r", "nearest", "nearest_label")


def write_files(folder: Path, scores: Scores, queries: Side, gallery: Side | None) -> None:
    """Write ``queries.csv``, ``neighbours.png`` and ``bad_images.csv``; no gallery means the queries."""
    searched = gallery or queries
    replace_file(folder / "queries.csv", csv_bytes(COLUMNS, _rows(scores, queries, searched)))
    rows = [
        (
            _found(queries, query),
            float(scores.best_known_precision[query]),
            [_found(searched, place) for place in scores.nearest[query].tolist()],
        )
        for query in chosen_queries(scores)
    ]
    replace_file(folder / "neighbours.png", png(draw_neighbours(rows, LIGHT), dpi=110))
    bad = [image for side in (queries, gallery) if side for image in side.embeddings.bad]
    RunFolder(folder).write_bad_images(bad)


def _found(side: Side, place: int) -> Found:
    return Found(side.label(place), thumbnail(side.images, int(side.embeddings.ids[place])))


def _rows(scores: Scores, queries: Side, gallery: Side) -> Iterator[list[object]]:
    whole = scores.precision
    for query, matches in enumerate(scores.matches.tolist()):
        nearest = int(scores.nearest[query, 0])
        yield [
            queries.name(query),
            queries.label(query),
            matches,
            int(scores.first_match[query]) or "",
            f"{whole[query]:.6g}" if matches and whole is not None else "",
            f"{scores.precision_at_r[query]:.6g}" if matches else "",
            gallery.name(nearest),
            gallery.label(nearest),
        ]
