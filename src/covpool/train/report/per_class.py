"""Accuracy per class with intervals, and the worst images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.stats import binomtest

from covpool.drawing import Theme, drawn, new_figure, text_style
from covpool.train.report.record import Predictions
from covpool.train.report.thumbnails import Tile, squared
from covpool.train.run_folder import csv_bytes

# Of a normal distribution, 95 % lies within so many standard deviations.
Z = 1.959963984540054


def wilson(right: int, images: int) -> tuple[float, float]:
    """A 95 % interval of a share (Wilson 1927), which is good for few images and near 0 and 1 as well.

    Example:
        >>> low, high = wilson(8, 10)
        >>> f"{low:.3f} {high:.3f}"
        '0.490 0.943'
    """
    middle = (right + Z * Z / 2) / (images + Z * Z)
    half = Z / (images + Z * Z) * math.sqrt(right * (images - right) / images + Z * Z / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class PairedDifference:
    """Two models on the same images.

    Attributes:
        images: how many there are.
        first_only: those that the first gets right and the second does not.
        second_only: those that the second gets right and the first does not.
    """

    images: int
    first_only: int
    second_only: int

    @property
    def difference(self) -> float:
        """The first's share of right answers less the second's."""
        return (self.first_only - self.second_only) / self.images

    @property
    def interval(self) -> tuple[float, float]:
        """A 95 % interval of the difference.

        It is Wald's, with half an image more in each of the four fields of the table (Agresti and Min 2005):
        it keeps what it promises for few images too, and is never empty, as that of a bootstrap is where the
        models agree on all images.
        """
        images = self.images + 2
        first, second = self.first_only + 0.5, self.second_only + 0.5
        middle = (first - second) / images
        half = Z * math.sqrt(first + second - (first - second) ** 2 / images) / images
        return max(-1.0, middle - half), min(1.0, middle + half)

    @property
    def p_value(self) -> float:
        """How often a difference as large comes by chance alone: McNemar's test, exact (a sign test)."""
        differing = self.first_only + self.second_only
        return float(binomtest(self.first_only, differing).pvalue) if differing else 1.0

    @property
    def is_clear(self) -> bool:
        """Whether chance is an unlikely explanation, by the test and by the interval."""
        low, high = self.interval
        return self.p_value < 0.05 and not low <= 0 <= high


HEADER = ("class", "images", "precision", "recall", "f1", "most_confused_with", "times")


class ClassRow(NamedTuple):
    """A class; what cannot be told, for want of images, is NaN.

    Attributes:
        name: of the class.
        images: how many there are of it.
        precision: the share of it among the images that were taken for it.
        recall: the share of its images that were taken for it.
        f1: the harmonic mean of the two.
        confused_with: what its images are wrongly taken for most often; empty if they never are.
        times: how often that is.
    """

    name: str
    images: int
    precision: float
    recall: float
    f1: float
    confused_with: str
    times: int


class Errors(NamedTuple):
    """The pairs of classes that were confused, most often first.

    Attributes:
        labels: what the images are.
        predicted: what they were taken for.
        times: how often.
    """

    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]
    times: NDArray[np.int64]


def errors_by_pair(predictions: Predictions) -> Errors:
    """Count the errors. Only pairs that occur are kept: a table of all is too large for many classes."""
    wrong, classes = ~predictions.right, len(predictions.classes)
    pairs, times = np.unique(
        predictions.labels[wrong] * classes + predictions.predicted[wrong], return_counts=True
    )
    order = np.argsort(-times, kind="stable")
    return Errors(pairs[order] // classes, pairs[order] % classes, times[order])


def per_class(predictions: Predictions) -> list[ClassRow]:
    """A row for each class, in the order of the classes."""
    classes = len(predictions.classes)
    images = np.bincount(predictions.labels, minlength=classes)
    taken = np.bincount(predictions.predicted, minlength=classes)
    right = np.bincount(predictions.labels[predictions.right], minlength=classes)
    confused: dict[int, tuple[str, int]] = {}
    for label, other, times in zip(*(column.tolist() for column in errors_by_pair(predictions)), strict=True):
        confused.setdefault(label, (predictions.classes[other], times))
    return [
        ClassRow(
            name,
            int(images[number]),
            _share(right[number], taken[number]),
            _share(right[number], images[number]),
            _share(2 * right[number], images[number] + taken[number]),
            *confused.get(number, ("", 0)),
        )
        for number, name in enumerate(predictions.classes)
    ]


def per_class_csv(rows: list[ClassRow]) -> bytes:
    """The rows as a file; what is NaN is left empty."""
    return csv_bytes(HEADER, ([_short(value) for value in row] for row in rows))


def _share(part: int, whole: int) -> float:
    return float(part / whole) if whole else math.nan


def _short(value: object) -> object:
    """As people read it."""
    if not isinstance(value, float):
        return value
    return "" if math.isnan(value) else f"{value:.6g}"


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
