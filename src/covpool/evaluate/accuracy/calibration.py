"""Whether a network is right as often as it says it is (Guo et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covpool.train.metrics import Predictions

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
