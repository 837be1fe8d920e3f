"""How well each class is told from the others."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from covpool.train.csv_file import csv_bytes
from covpool.train.report.record import Predictions

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
