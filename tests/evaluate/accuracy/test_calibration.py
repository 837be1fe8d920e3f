from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torchmetrics.classification import MulticlassCalibrationError

from covpool.evaluate.accuracy import BINS, bin_of, calibrate
from tests.evaluate.accuracy.made import made_logits, predictions_of


@pytest.mark.parametrize("skill", [0.5, 2.0, 6.0])
def test_errors_are_those_of_torchmetrics(skill: float) -> None:
    logits, labels = made_logits(3000, 7, skill=skill)
    logits = logits / 2  # or float32 rounds some confidences to 1, for which torchmetrics has another bin
    found = calibrate(predictions_of(logits, labels))
    for norm, value in (("l1", found.expected_error), ("max", found.maximum_error)):
        theirs = MulticlassCalibrationError(7, n_bins=BINS, norm=norm)(logits.softmax(1), labels)  # type: ignore[arg-type]
        assert value == pytest.approx(float(theirs), abs=1e-5)
    assert found.expected_error > 0.02
    assert sum(found.images) == 3000


def test_upper_ends_belong_to_their_bins() -> None:
    below = np.nextafter(np.float32(1), np.float32(0))
    confidence = np.array([1 / 15, 1 / 15 + 1e-6, 3 / 15 - 1e-6, below, 1.0], dtype=np.float64)
    assert bin_of(confidence).tolist() == [0, 1, 2, 14, 14]


def test_a_bin_by_hand() -> None:
    made = predictions_of(*made_logits(4, 3))
    made = dataclasses.replace(
        made,
        labels=np.array([0, 0, 1, 2]),
        predicted=np.array([0, 1, 1, 2]),
        confidence=np.array([0.9, 0.92, 0.5, 1.0], dtype=np.float32),
    )
    found = calibrate(made)
    assert found.images == (*[0] * 7, 1, 0, 0, 0, 0, 0, 2, 1)
    assert found.accuracy[13] == 0.5
    assert found.confidence[13] == pytest.approx(0.91)
    assert found.accuracy[0] is None
    assert found.expected_error == pytest.approx((2 * 0.41 + 0.5 + 0) / 4)
    assert found.maximum_error == pytest.approx(0.5)


def test_what_is_right_as_often_as_it_says_has_no_error() -> None:
    confidence = np.full(1000, 0.7, dtype=np.float32)
    made = predictions_of(torch.zeros(1000, 2), torch.zeros(1000, dtype=torch.int64))
    made = dataclasses.replace(
        made, predicted=(np.arange(1000) >= 700).astype(np.int64), confidence=confidence
    )
    assert calibrate(made).expected_error == pytest.approx(0, abs=1e-6)
