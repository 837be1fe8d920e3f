from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from covpool.evaluate import accuracy as bootstrap
from covpool.evaluate.accuracy import intervals
from covpool.training.metrics import Predictions, measure
from tests.evaluate.accuracy.made import made_logits, predictions_of

K = 5


def some(predictions: Predictions, ids: Any) -> Predictions:
    columns = {field.name: getattr(predictions, field.name)[ids] for field in dataclasses.fields(predictions)}
    return Predictions(**columns)


def all_metrics(predictions: Predictions) -> dict[str, float]:
    metrics = measure(predictions, K)
    return {name: metrics[name] for name in ("top1", "top5", "macro_f1", "balanced_accuracy")}


@pytest.mark.parametrize("n", [1, 40, 700])
def test_a_resample_is_measured_as_a_set_is(n: int) -> None:
    """This includes resamples without some of the classes."""
    predictions = predictions_of(*made_logits(n, K))
    random = np.random.default_rng(3)
    drawn = random.integers(n, size=(6, n))
    weights = np.stack([np.bincount(row, minlength=n) for row in drawn]).astype(float)
    found = bootstrap._metrics(bootstrap._terms(predictions, K) @ weights.T, n, K)
    for number, row in enumerate(drawn):
        for name, value in all_metrics(some(predictions, row)).items():
            assert found[name][number] == pytest.approx(value, abs=1e-6), name


def test_every_image_is_drawn_alike() -> None:
    weights = bootstrap._weights(np.random.default_rng(0), 4000, 10)
    assert (weights.sum(axis=1) == 10).all()
    np.testing.assert_allclose(weights.mean(axis=0), 1, atol=0.08)
    np.testing.assert_allclose(weights.var(axis=0), 0.9, atol=0.1)


def test_intervals_are_those_of_scipy() -> None:
    predictions = predictions_of(*made_logits(400, K))
    names = ("top1", "macro_f1", "balanced_accuracy")

    def of_resample(ids: Any) -> list[float]:
        metrics = all_metrics(some(predictions, ids))
        return [metrics[name] for name in names]

    theirs = stats.bootstrap(
        (np.arange(400),),
        of_resample,
        n_resamples=4000,
        method="percentile",
        vectorized=False,
        rng=np.random.default_rng(1),
    ).confidence_interval
    ours = intervals(predictions, K, seed=0, resamples=8000)
    for name, *ends in zip(names, theirs.low, theirs.high, strict=True):
        assert ours[name] == pytest.approx(ends, abs=0.004)


def test_the_seed_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    predictions = predictions_of(*made_logits(100, K))
    assert intervals(predictions, K, seed=0) == intervals(predictions, K, seed=0)
    assert intervals(predictions, K, seed=0) != intervals(predictions, K, seed=1)
    whole = intervals(predictions, K, seed=0)
    monkeypatch.setattr(bootstrap, "BLOCK", 100 * 7)  # blocks of seven resamples, and a shorter one
    for name, ends in intervals(predictions, K, seed=0).items():
        assert ends == pytest.approx(whole[name], abs=0.02)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Count how often the interval contains the true value, for 300 samples of one population."""
    truth = all_metrics(predictions_of(*made_logits(200_000, K, seed=99)))
    names = ("top1", "macro_f1", "balanced_accuracy")
    held = dict.fromkeys(names, 0)
    for seed in range(300):
        found = intervals(predictions_of(*made_logits(250, K, seed=seed)), K, seed=seed, resamples=400)
        for name in names:
            low, high = found[name]
            held[name] += low <= truth[name] <= high
    for name, times in held.items():
        assert 0.90 <= times / 300 <= 0.985, name


def test_no_interval_of_the_calibration_error_excludes_the_truth() -> None:
    """Labels are drawn with the predicted probabilities, so the true calibration error is 0."""
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        logits = 2 * torch.randn(615, K, generator=generator)
        labels = torch.multinomial(logits.softmax(dim=1), 1, generator=generator)[:, 0]
        found = intervals(predictions_of(logits, labels), K, seed=seed, resamples=400)
        assert found.get("expected_calibration_error", (0.0, 0.0))[0] <= 1e-3
