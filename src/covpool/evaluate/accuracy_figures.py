"""Draw accuracy per class and the reliability diagram."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from covpool.data.image_set import ImageSet, Names
from covpool.drawing import LIGHT, Theme, drawn, dress, new_figure, png, text_style
from covpool.durable import replace_file
from covpool.evaluate.results import Results
from covpool.evaluate.statistics import BINS
from covpool.train.metrics import Predictions
from covpool.train.report.figures import draw_confusion
from covpool.train.report.per_class import ClassRow, errors_by_pair, per_class, per_class_csv, wilson
from covpool.train.report.record import Predictions as NamedPredictions

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


WIDTH = 1 / BINS


def draw_reliability(metrics: Mapping[str, float], calibration: Mapping[str, Any], theme: Theme) -> Figure:
    """A bar for each bin of confidences: how often it is right, and below, how many images it has.

    Args:
        metrics: with ``expected_calibration_error`` and ``maximum_calibration_error``.
        calibration: ``images``, ``confidence`` and ``accuracy`` of each bin.
        theme: the colours.
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
    middles = (np.arange(BINS) + 0.5) * WIDTH
    below.bar(middles, calibration["images"], 0.9 * WIDTH, color=theme.faint)
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
    middles = (np.array(filled) + 0.5) * WIDTH
    right = np.array([accuracy[number] for number in filled], dtype=float)
    sure = np.array([confidence[number] for number in filled], dtype=float)
    axes.plot((0, 1), (0, 1), color=theme.faint, linewidth=1, linestyle=(0, (4, 3)))
    axes.bar(middles, right, 0.9 * WIDTH, color=theme.series[0], label="accuracy")
    axes.hlines(
        sure,
        middles - 0.45 * WIDTH,
        middles + 0.45 * WIDTH,
        color=theme.series[1],
        linewidth=2.2,
        label="mean confidence",
    )
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("share that is right", color=theme.faint)
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
    """As reports have them."""
    return NamedPredictions(
        images.classes,
        Names(images.name(i) for i in predictions.ids.tolist()),
        predictions.labels,
        predictions.predicted,
        predictions.confidence.astype(float),
        predictions.label_confidence.astype(float),
    )
