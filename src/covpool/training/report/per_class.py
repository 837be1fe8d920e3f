"""Accuracy per class, and intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from covpool.training.report.record import Predictions
from covpool.training.run_folder import csv_bytes

# 95 % of a normal distribution lies within this many standard deviations.
Z = 1.959963984540054
HEADER = ("class", "images", "precision", "recall", "f1", "most_confused_with", "times")


def wilson(right: int, images: int) -> tuple[float, float]:
    """Return the 95 % Wilson interval of an accuracy.

    Example:
        >>> low, high = wilson(8, 10)
        >>> f"{low:.3f} {high:.3f}"
        '0.490 0.943'
    """
    interval = binomtest(right, images).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


@dataclass(frozen=True)
class PairedDifference:
    """Two models on the same images; ``first_only`` are those that only the first gets right."""

    images: int
    first_only: int
    second_only: int

    @property
    def difference(self) -> float:
        """The top-1 accuracy of the first minus that of the second."""
        return (self.first_only - self.second_only) / self.images

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the difference: Wald's with half an image added to each of the four fields.

        It covers small samples too (Agresti and Min 2005), and is not empty where the models agree.
        """
        images = self.images + 2
        first, second = self.first_only + 0.5, self.second_only + 0.5
        middle = (first - second) / images
        half = Z * math.sqrt(first + second - (first - second) ** 2 / images) / images
        return max(-1.0, middle - half), min(1.0, middle + half)

    @property
    def p_value(self) -> float:
        """The p-value of McNemar's exact test."""
        differing = self.first_only + self.second_only
        return float(binomtest(self.first_only, differing).pvalue) if differing else 1.0

    @property
    def is_clear(self) -> bool:
        """Whether the difference is significant, by the test and by the interval."""
        low, high = self.interval
        return self.p_value < 0.05 and not low <= 0 <= high


class ClassRow(NamedTuple):
    """The figures of a class; NaN where there are no images. ``confused_with`` is the most frequent error."""

    name: str
    images: int
    precision: float
    recall: float
    f1: float
    confused_with: str
    times: int


class Errors(NamedTuple):
    """Pairs of confused classes, most frequent first, and how often each occurs."""

    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]
    times: NDArray[np.int64]


def errors_by_pair(predictions: Predictions) -> Errors:
    """Count the errors. Only pairs that occur are kept: a full table is too large for many classes."""
    wrong, classes = ~predictions.right, len(predictions.classes)
    pairs, times = np.unique(
        predictions.labels[wrong] * classes + predictions.predicted[wrong], return_counts=True
    )
    order = np.argsort(-times, kind="stable")
    return Errors(pairs[order] // classes, pairs[order] % classes, times[order])


def per_class(predictions: Predictions) -> list[ClassRow]:
    """Return a row for each class, in the order of the classes."""
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
    """Return the rows as CSV; NaN is left empty."""
    return csv_bytes(HEADER, ([_short(value) for value in row] for row in rows))


def _share(part: int, whole: int) -> float:
    return float(part / whole) if whole else math.nan


def _short(value: object) -> object:
    if not isinstance(value, float):
        return value
    return "" if math.isnan(value) else f"{value:.6g}"
