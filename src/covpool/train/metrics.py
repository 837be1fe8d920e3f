"""What is measured on a set, from the predictions for each of its images.

The predictions are gathered from all processes first, so a metric is the same on any number of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from covpool.errors import UsageError


@dataclass(frozen=True, eq=False)
class Predictions:
    """For each image, in the order of the set; arrays of one length.

    Attributes:
        ids: the image's number in the set.
        labels: its class.
        predicted: the class of the highest logit.
        confidence: the probability of that class.
        label_confidence: the probability of its own class.
        losses: the cross-entropy.
        in_top5: whether its class is among the five highest.
    """

    ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]
    confidence: NDArray[np.float32]
    label_confidence: NDArray[np.float32]
    losses: NDArray[np.float32]
    in_top5: NDArray[np.bool_]


@dataclass(frozen=True)
class Metrics:
    """Of a set; fractions from 0 to 1.

    Attributes:
        loss: the mean cross-entropy.
        top1: the fraction whose highest logit is right.
        top5: the fraction with the right class among the five highest.
        macro_f1: the mean of the classes' F1, of those with images or predictions.
        balanced_accuracy: the mean of the classes' recall, of those with images.
        images: how many there were.
    """

    loss: float
    top1: float
    top5: float
    macro_f1: float
    balanced_accuracy: float
    images: int


# Of all metrics but the number of images.
NAMES = tuple(one.name for one in fields(Metrics) if one.name != "images")


def measure(predictions: Predictions, classes: int) -> Metrics:
    """All metrics.

    Raises:
        ValueError: if there is no image.
    """
    n = len(predictions.ids)
    if n == 0:
        raise UsageError("none of the images could be used, so there is nothing to measure")
    right = predictions.labels == predictions.predicted
    hits = np.bincount(predictions.labels[right], minlength=classes)
    of_class = np.bincount(predictions.labels, minlength=classes)
    called = np.bincount(predictions.predicted, minlength=classes)
    is_there, is_named = of_class > 0, of_class + called > 0
    return Metrics(
        loss=math.fsum(predictions.losses.tolist()) / n,  # exact, whatever the order
        top1=int(right.sum()) / n,
        top5=int(predictions.in_top5.sum()) / n,
        macro_f1=float(np.mean(2 * hits[is_named] / (of_class + called)[is_named])),
        balanced_accuracy=float(np.mean(hits[is_there] / of_class[is_there])),
        images=n,
    )
