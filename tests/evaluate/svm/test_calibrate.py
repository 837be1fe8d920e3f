from __future__ import annotations

import numpy as np
import pytest

from covpool.evaluate.svm import classifier as calibrate
from covpool.evaluate.svm.classifier import calibrated
from covpool.evaluate.svm.solvers import LinearScores, solve_in_memory
from tests.evaluate.svm.samples import a_problem


def test_medians_of_own_and_other_samples() -> None:
    problem = a_problem(4, 31, 60)
    scores = solve_in_memory(problem)
    x = problem.rows.read(problem.numbers)
    before, after = scores.of(x), calibrated(scores, problem).of(x)
    for k in range(4):
        own = problem.labels == k
        assert np.median(after[own, k]) == pytest.approx(1, abs=1e-5)
        assert np.median(after[~own, k]) == pytest.approx(-1, abs=1e-5)
        assert np.array_equal(after[:, k].argsort(), before[:, k].argsort())


def test_of_many_samples_some_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = a_problem(4, 300, 60)
    scores = solve_in_memory(problem)
    exact = calibrated(scores, problem)
    monkeypatch.setattr(calibrate, "OTHERS", 600)
    some = calibrated(scores, problem)
    x = problem.rows.read(problem.numbers)
    assert not np.array_equal(some.bias, exact.bias)
    np.testing.assert_allclose(some.of(x), exact.of(x), atol=0.1)


def test_a_class_that_is_not_told_apart_stays_as_it_is() -> None:
    problem = a_problem(3, 10, 20)
    nothing = LinearScores(np.zeros((3, 20), np.float32), np.full(3, -1, np.float32))
    found = calibrated(nothing, problem)
    assert np.array_equal(found.weights, nothing.weights)
    assert np.array_equal(found.bias, nothing.bias)
