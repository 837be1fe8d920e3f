"""Draw the figures and write the tables of evaluation and retrieval results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from PIL import Image
from scipy.stats import binomtest

from covpool.data.image_set import ImageSet, Names
from covpool.drawing import LIGHT, Theme, drawn, dress, new_figure, png, text_style
from covpool.evaluate.results import Results
from covpool.evaluate.search import Scores, Side
from covpool.storage.files import replace_file
from covpool.training.metrics import Predictions
from covpool.training.report.figures import draw_confusion
from covpool.training.report.record import ClassRow, errors_by_pair, per_class, per_class_csv
from covpool.training.report.record import Predictions as NamedPredictions
from covpool.training.report.rendering import squared, thumbnail
from covpool.training.run_folder import RunFolder, csv_bytes

# More classes would not be legible.
SHOWN = 40
CLASS_LETTERS = 30


def draw_classes(rows: Sequence[ClassRow], theme: Theme) -> Figure:
    """Draw a line per class: recall with a 95 % interval (Wilson), precision and number of images."""
    there = [
        (row, drawn(row.name, f"class {number}", CLASS_LETTERS))
        for number, row in enumerate(rows)
        if row.images
    ]
    shown = sorted(there, key=lambda pair: (pair[0].recall, pair[0].name))[:SHOWN]
    figure = new_figure(theme, 7.2, 1.3 + 0.24 * max(len(shown), 4))
    axes = figure.subplots()
    dress(axes, theme)
    axes.grid(visible=False, axis="y")
    _draw_classes(axes, [row for row, _ in shown], theme)
    names = [f"{name}  ({row.images:,})" for row, name in shown]
    axes.set_yticks(range(len(names)), names, **{**text_style(), "color": theme.ink, "fontsize": 9})
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(-2, 102)
    axes.set_xlabel("recall and precision, %", color=theme.faint)
    if len(there) > SHOWN:
        axes.set_ylabel(f"the {SHOWN} hardest of {len(there):,} classes", color=theme.faint)
    return figure


def _draw_classes(axes: Axes, rows: Sequence[ClassRow], theme: Theme) -> None:
    heights = range(len(rows))
    tests = [binomtest(round(row.recall * row.images), row.images) for row in rows]
    ends = [test.proportion_ci(method="wilson") for test in tests]
    axes.hlines(
        heights,
        [100 * end.low for end in ends],
        [100 * end.high for end in ends],
        color=theme.series[0],
        alpha=0.35,
        linewidth=4,
    )
    recall = [100 * row.recall for row in rows]
    axes.plot(recall, heights, "o", color=theme.series[0], markersize=5, label="recall, with 95 % interval")
    precision = [100 * row.precision for row in rows]  # where it is NaN, nothing is drawn
    axes.plot(precision, heights, "D", color=theme.series[1], markersize=4, label="precision")
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, labelcolor=theme.ink, fontsize=9
    )


def draw_reliability(metrics: Mapping[str, float], calibration: Mapping[str, Any], theme: Theme) -> Figure:
    """Draw a reliability diagram: accuracy per confidence bin, and below it the number of images.

    Args:
        metrics: metrics with ``expected_calibration_error`` and ``maximum_calibration_error``.
        calibration: ``images``, ``confidence`` and ``accuracy`` of each bin.
        theme: the colors.
    """
    figure = new_figure(theme, 4.8, 5.6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for axes in (above, below):
        dress(axes, theme)
    _draw_bins(above, calibration["confidence"], calibration["accuracy"], theme)
    errors = (100 * metrics[f"{name}_calibration_error"] for name in ("expected", "maximum"))
    above.set_title(
        "calibration error: expected {:.1f} %, largest of a bin {:.1f} %".format(*errors),
        fontsize=10,
        color=theme.ink,
        loc="left",
    )
    bins = len(calibration["images"])
    below.bar((np.arange(bins) + 0.5) / bins, calibration["images"], 0.9 / bins, color=theme.faint)
    below.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    below.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    below.set_ylabel("images", color=theme.faint)
    below.set_xlabel("confidence", color=theme.faint)
    below.set_xlim(0, 1)
    return figure


def _draw_bins(
    axes: Axes, confidence: Sequence[float | None], accuracy: Sequence[float | None], theme: Theme
) -> None:
    filled = [number for number, value in enumerate(accuracy) if value is not None]
    width = 1 / len(confidence)
    middles = (np.array(filled) + 0.5) * width
    right = np.array([accuracy[number] for number in filled], dtype=float)
    sure = np.array([confidence[number] for number in filled], dtype=float)
    axes.plot((0, 1), (0, 1), color=theme.faint, linewidth=1, linestyle=(0, (4, 3)))
    axes.bar(middles, right, 0.9 * width, color=theme.series[0], label="accuracy")
    axes.hlines(
        sure,
        middles - 0.45 * width,
        middles + 0.45 * width,
        color=theme.series[1],
        linewidth=2.2,
        label="mean confidence",
    )
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("accuracy", color=theme.faint)
    axes.legend(loc="upper left", frameon=False, labelcolor=theme.ink, fontsize=9)


def write_figures(folder: Path, results: Results, predictions: Predictions, images: ImageSet) -> None:
    """Write ``confusion.png``, ``per_class.png``, ``per_class.csv`` and ``reliability.png``."""
    named = _named(predictions, images)
    rows = per_class(named)
    figures = {
        "confusion": draw_confusion(named, errors_by_pair(named), LIGHT),
        "per_class": draw_classes(rows, LIGHT),
        "reliability": draw_reliability(results["metrics"], results["calibration"], LIGHT),
    }
    for name, figure in figures.items():
        replace_file(folder / f"{name}.png", png(figure))
    replace_file(folder / "per_class.csv", per_class_csv(rows))


def _named(predictions: Predictions, images: ImageSet) -> NamedPredictions:
    """Return predictions with names, as reports use them."""
    return NamedPredictions(
        images.classes,
        Names(images.name(i) for i in predictions.ids.tolist()),
        predictions.labels,
        predictions.predicted,
        predictions.confidence.astype(float),
        predictions.label_confidence.astype(float),
    )


QUERIES = 10
QUERY_LETTERS = 24
# In inches: an image with its frame, a cell with its label and spacing, and the margins of the figure.
SIDE, CELL, MARGIN, TOP = 1.6, (1.75, 2.05), 0.12, 0.4
# Minimum number of columns, so that the title fits.
FEWEST = 5
TITLE = "query, and the nearest images; above the queries of the lowest average precision (AP), below others"
# Frames of matches and of other images; they differ in lightness too, for color-blind readers.
RIGHT, WRONG = "#1f9d45", "#a61b1b"


class Shown(NamedTuple):
    """The class name of an image, and the image if it is readable."""

    label: str
    picture: Image.Image | None


Row = tuple[Shown, float, Sequence[Shown]]


def chosen_queries(scores: Scores, most: int = QUERIES) -> list[int]:
    """Return queries to draw: half have the lowest average precision, the others are spread over the set."""
    counted = np.flatnonzero(scores.counted)
    worst = counted[np.argsort(scores.best_known_precision[counted], kind="stable")[: (most + 1) // 2]]
    others = np.setdiff1d(counted, worst)
    count = min(most - len(worst), len(others))
    # The middles of equal parts, so that the first and last class are not always included.
    spread = others[((np.arange(count) + 0.5) * len(others) / max(count, 1)).astype(int)]
    return [*worst.tolist(), *spread.tolist()]


def draw_neighbours(rows: Sequence[Row], theme: Theme, title: str = TITLE) -> Figure:
    """Draw a row for each query: the image, and the nearest images, framed by whether they match.

    Args:
        rows: the query, its average precision (NaN if it is unknown), and its neighbors.
        theme: the colors.
        title: a line above the rows.
    """
    columns = max(FEWEST, 1 + max(len(neighbors) for _, _, neighbors in rows))
    width, height = columns * CELL[0] + MARGIN, len(rows) * CELL[1] + TOP
    figure = new_figure(theme, width, height)
    figure.set_layout_engine("none")
    # One axes for all images: separate axes would take seconds to lay out.
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    axes.text(MARGIN, TOP / 2, title, va="center", fontsize=10, color=theme.faint)
    for line, (query, precision, neighbors) in enumerate(rows):
        y = TOP + line * CELL[1]
        _draw(axes, MARGIN, y, query, theme.ink, theme)
        is_measured = not math.isnan(precision)
        if is_measured:
            axes.text(MARGIN, y + SIDE + 0.3, f"AP {precision:.2f}", fontsize=7.5, color=theme.faint)
        for column, neighbor in enumerate(neighbors, start=1):
            colour = (RIGHT if neighbor.label == query.label else WRONG) if is_measured else theme.ink
            _draw(axes, MARGIN + column * CELL[0], y, neighbor, colour, theme)
    return figure


def _draw(axes: Axes, x: float, y: float, shown: Shown, colour: str, theme: Theme) -> None:
    """Draw an image at a position, with a frame and its class below."""
    picture = Image.new("RGB", (2, 2), "gray") if shown.picture is None else shown.picture
    extent = (x, x + SIDE, y + SIDE, y)
    axes.imshow(squared(picture, theme.grid), extent=extent, aspect="auto")
    axes.add_patch(Rectangle((x, y), SIDE, SIDE, fill=False, edgecolor=colour, linewidth=3))
    label = drawn(shown.label, "(no font for its name)", QUERY_LETTERS)
    axes.text(x, y + SIDE + 0.16, label, fontsize=7.5, color=colour, **text_style())


COLUMNS = ("name", "label", "matches", "first_match", "average_precision", "at_r", "nearest", "nearest_label")


def write_files(folder: Path, scores: Scores, queries: Side, gallery: Side | None) -> None:
    """Write ``queries.csv``, ``neighbours.png`` and ``bad_images.csv``; no gallery means the queries."""
    searched = gallery or queries
    replace_file(folder / "queries.csv", csv_bytes(COLUMNS, _rows(scores, queries, searched)))
    rows = [
        (
            _shown(queries, query),
            float(scores.best_known_precision[query]),
            [_shown(searched, place) for place in scores.nearest[query].tolist()],
        )
        for query in chosen_queries(scores)
    ]
    replace_file(folder / "neighbours.png", png(draw_neighbours(rows, LIGHT), dpi=110))
    bad = [image for side in (queries, gallery) if side for image in side.embeddings.bad]
    RunFolder(folder).write_bad_images(bad)


def _shown(side: Side, place: int) -> Shown:
    return Shown(side.label(place), thumbnail(side.images, int(side.embeddings.ids[place])))


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
