"""Bootstrap intervals of metrics, and the calibration error.

Every metric is a function of sums over images. A resample is a row of weights (how often each image was
drawn), and all sums of many resamples are one product with a sparse matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from covpool.training.metrics import METRICS, Counts, Predictions

RESAMPLES = 2000
LEVEL = 0.95
# Number of values in the largest array of a block of resamples.
BLOCK = 1 << 22

Column = NDArray[np.float64]


def intervals(
    predictions: Predictions, classes: int, seed: int, resamples: int = RESAMPLES
) -> dict[str, tuple[float, float]]:
    """Return a 95 % bootstrap interval of each accuracy metric, by name.

    The calibration error has none. Chance gaps between confidence and accuracy add up in every resample, so
    its bootstrap interval would lie above the true value: it excluded 0 for calibrated predictions.

    Args:
        predictions: of at least one image.
        classes: the number of classes.
        seed: seed of the resamples.
        resamples: the number of resamples.
    """
    n = len(predictions.ids)
    terms_Fn = _terms(predictions, classes)
    random = np.random.default_rng(seed)
    rows = max(1, BLOCK // max(terms_Fn.shape))
    parts = []
    for start in range(0, resamples, rows):
        weights_Rn = _weights(random, min(rows, resamples - start), n)
        parts.append(_metrics(terms_Fn @ weights_Rn.T, n, classes))
    tail = 50 * (1 - LEVEL)
    ends = {
        name: np.percentile(np.concatenate([part[name] for part in parts]), (tail, 100 - tail))
        for name in parts[0]
    }
    return {name: (float(low), float(high)) for name, (low, high) in ends.items()}


def _weights(random: np.random.Generator, rows: int, n: int) -> Column:
    """Return how often each of ``n`` images is drawn in each of ``rows`` resamples."""
    drawn = random.integers(n, size=(rows, n)) + n * np.arange(rows)[:, None]
    return np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n).astype(np.float64)


def _terms(predictions: Predictions, classes: int) -> sparse.csr_array:
    """Return the terms of each image: correct, in the top 5, and three counts of its class."""
    n, labels, predicted = len(predictions.ids), predictions.labels, predictions.predicted
    right = (labels == predicted).astype(np.float64)
    ones, zeros = np.ones(n), np.zeros(n, dtype=np.int64)
    first = 2 + classes * np.arange(3)
    added = [
        (zeros, right),
        (zeros + 1, predictions.in_top5.astype(np.float64)),
        (first[0] + labels, right),
        (first[1] + labels, ones),
        (first[2] + predicted, ones),
    ]
    rows, values = (np.concatenate(column) for column in zip(*added, strict=True))
    images = np.tile(np.arange(n), len(added))
    return sparse.csr_array((values, (rows, images)), shape=(2 + 3 * classes, n))


def _metrics(sums_FR: Column, n: int, classes: int) -> dict[str, Column]:
    """Return the metrics of each resample."""
    counts = Counts(n, sums_FR[0], sums_FR[1], *sums_FR[2:].reshape(3, classes, -1))
    return {name: metric.of(counts) for name, metric in METRICS.items()}


BINS = 15


@dataclass(frozen=True)
class Calibration:
    """Calibration of the confidences, in 15 bins of equal width; fractions from 0 to 1.

    Attributes:
        expected_error: ECE, the mean gap between accuracy and mean confidence, weighted by images per bin.
        maximum_error: the largest gap of a bin.
        images: the number of images per bin; a bin includes its upper end.
        confidence: the mean confidence per bin; ``None`` for an empty bin.
        accuracy: the accuracy per bin; ``None`` for an empty bin.
    """

    expected_error: float
    maximum_error: float
    images: tuple[int, ...]
    confidence: tuple[float | None, ...]
    accuracy: tuple[float | None, ...]


def bin_of(confidence: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the bin of each confidence; a bin includes its upper end, so that 1.0 is in the last."""
    ends = np.linspace(0, 1, BINS + 1)[1:-1]
    return np.digitize(confidence, ends, right=True)


def calibrate(predictions: Predictions) -> Calibration:
    """Return the calibration of the predictions of at least one image."""
    place = bin_of(predictions.confidence)
    right = predictions.labels == predictions.predicted
    images = np.bincount(place, minlength=BINS)
    confidence = np.bincount(place, weights=predictions.confidence.astype(np.float64), minlength=BINS)
    accuracy = np.bincount(place, weights=right.astype(np.float64), minlength=BINS)
    gaps = np.abs(accuracy - confidence)
    filled = images > 0
    return Calibration(
        expected_error=float(gaps.sum() / images.sum()),
        maximum_error=float((gaps[filled] / images[filled]).max()),
        images=tuple(images.tolist()),
        confidence=_means(confidence, images),
        accuracy=_means(accuracy, images),
    )


def _means(sums: NDArray[Any], images: NDArray[Any]) -> tuple[float | None, ...]:
    return tuple(
        total / count if count else None for total, count in zip(sums.tolist(), images.tolist(), strict=True)
    )
