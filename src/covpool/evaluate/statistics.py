"""Bootstrap intervals and calibration error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from covpool.train.metrics import Predictions

RESAMPLES = 2000
LEVEL = 0.95
# Numbers in the largest array of a block of resamples.
BLOCK = 1 << 22

Column = NDArray[np.float64]


def intervals(
    predictions: Predictions, classes: int, seed: int, resamples: int = RESAMPLES
) -> dict[str, tuple[float, float]]:
    """A 95 % interval of each metric but the loss, by its name.

    Args:
        predictions: for at least one image.
        classes: how many there are.
        seed: of the resamples.
        resamples: how many.
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
    """How often each of ``n`` images is in each of ``rows`` resamples of ``n`` draws."""
    drawn = random.integers(n, size=(rows, n)) + n * np.arange(rows)[:, None]
    return np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n).astype(np.float64)


def _terms(predictions: Predictions, classes: int) -> sparse.csr_array:
    """What each image adds to each sum: right, in the top 5, three counts of a class, the gap of a bin."""
    n, labels, predicted = len(predictions.ids), predictions.labels, predictions.predicted
    right = (labels == predicted).astype(np.float64)
    ones, zeros = np.ones(n), np.zeros(n, dtype=np.int64)
    first = 2 + classes * np.arange(4)
    added = [
        (zeros, right),
        (zeros + 1, predictions.in_top5.astype(np.float64)),
        (first[0] + labels, right),
        (first[1] + labels, ones),
        (first[2] + predicted, ones),
        (first[3] + bin_of(predictions.confidence), right - predictions.confidence),
    ]
    rows, values = (np.concatenate(column) for column in zip(*added, strict=True))
    images = np.tile(np.arange(n), len(added))
    return sparse.csr_array((values, (rows, images)), shape=(int(first[3]) + BINS, n))


def _metrics(sums_FR: Column, n: int, classes: int) -> dict[str, Column]:
    """As :func:`covpool.train.metrics.measure` and :func:`calibrate` have them, for each resample."""
    hits, of_class, called = sums_FR[2 : 2 + 3 * classes].reshape(3, classes, -1)
    return {
        "top1": sums_FR[0] / n,
        "top5": sums_FR[1] / n,
        "macro_f1": _mean_of_shares(2 * hits, of_class + called),
        "balanced_accuracy": _mean_of_shares(hits, of_class),
        "expected_calibration_error": np.abs(sums_FR[2 + 3 * classes :]).sum(axis=0) / n,
    }


def _mean_of_shares(parts_KR: Column, wholes_KR: Column) -> Column:
    """The mean over classes of part by whole; of those that a resample has."""
    is_there = wholes_KR > 0
    shares = np.divide(parts_KR, wholes_KR, out=np.zeros_like(parts_KR), where=is_there)
    means: Column = shares.sum(axis=0) / is_there.sum(axis=0)
    return means


BINS = 15


@dataclass(frozen=True)
class Calibration:
    """Images in bins by their confidence, and how far it is from the truth there; fractions from 0 to 1.

    Attributes:
        expected_error: ECE: the mean over images of their bin's gap between accuracy and mean confidence.
        maximum_error: the largest gap of a bin.
        images: in each of 15 equally wide bins, of the confidences above its lower end, up to its upper one.
        confidence: the mean in each bin; ``None`` where there is no image.
        accuracy: likewise.
    """

    expected_error: float
    maximum_error: float
    images: tuple[int, ...]
    confidence: tuple[float | None, ...]
    accuracy: tuple[float | None, ...]


def bin_of(confidence: NDArray[np.float32]) -> NDArray[np.int64]:
    """The bin of each confidence; the upper ends belong to the bins, so that certainty is in the last."""
    ends = np.linspace(0, 1, BINS + 1)[1:-1]
    return np.digitize(confidence, ends, right=True)


def calibrate(predictions: Predictions) -> Calibration:
    """The calibration of predictions, of which there must be some."""
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
