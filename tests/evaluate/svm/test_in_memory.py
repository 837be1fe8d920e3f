"""LinearSVC, with and without the rotation."""

from __future__ import annotations

import time

import numpy as np
import pytest
from sklearn.svm import LinearSVC

from covpool.evaluate.svm.solvers import Problem, solve_in_memory
from tests.evaluate.svm.samples import Matrix, a_problem, features


def plain(problem: Problem) -> LinearSVC:
    x = problem.rows.read(problem.numbers).astype(np.float64)
    return LinearSVC(C=problem.c, tol=1e-7, max_iter=100_000, random_state=1).fit(x, problem.labels)


@pytest.mark.parametrize("columns", [30, 500])  # fewer and more columns than samples
@pytest.mark.parametrize("c", [1.0, 0.1])
def test_the_scores_are_those_of_linear_svc(columns: int, c: float) -> None:
    x, labels = features(5, 40, columns)
    problem = Problem(Matrix(x), np.arange(len(x)), labels, 5, c)
    new = features(5, 10, columns, seed=1)[0]
    expected = plain(problem).decision_function(new)
    np.testing.assert_allclose(solve_in_memory(problem).of(new), expected, atol=1e-5)


@pytest.mark.slow
def test_of_600_rows_and_8256_columns_it_is_also_faster() -> None:
    problem = a_problem(3, 200, 8256)
    new = features(3, 20, 8256, seed=1)[0]
    started = time.perf_counter()
    found = solve_in_memory(problem).of(new)
    middle = time.perf_counter()
    expected = plain(problem).decision_function(new)
    ended = time.perf_counter()
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert middle - started < 0.5 * (ended - middle)


def test_equal_rows_and_a_row_of_zeros() -> None:
    x, labels = features(3, 20, 200)
    x = np.concatenate([x, x, np.zeros((1, 200), np.float32)])
    problem = Problem(Matrix(x), np.arange(len(x)), np.concatenate([labels, labels, [2]]), 3)
    np.testing.assert_allclose(solve_in_memory(problem).of(x), plain(problem).decision_function(x), atol=1e-5)


def test_two_classes_have_a_score_each() -> None:
    problem = a_problem(2, 20, 100)
    x = problem.rows.read(problem.numbers)
    scores = solve_in_memory(problem).of(x)
    np.testing.assert_allclose(scores[:, 1], plain(problem).decision_function(x), atol=1e-5)
    np.testing.assert_allclose(scores[:, 0], -scores[:, 1], atol=1e-6)


def test_rows_that_are_no_samples_do_not_count() -> None:
    whole = a_problem(3, 20, 100)
    spoiled = Matrix(np.concatenate([np.full((1, 100), np.nan, np.float32), whole.rows.read(whole.numbers)]))
    problem = Problem(spoiled, whole.numbers + 1, whole.labels, 3)
    assert np.array_equal(solve_in_memory(problem).weights, solve_in_memory(whole).weights)


@pytest.mark.parametrize(
    ("classes", "c", "sentence"),
    [
        (4, 1.0, "^1 classes have no readable training image, first class 3"),
        (3, 0.0, "^C must be above 0; got 0.0"),
        (1, 1.0, "^an SVM needs at least 2 classes; got 1"),
    ],
)
def test_what_cannot_be_solved_is_told(classes: int, c: float, sentence: str) -> None:
    x, labels = features(3, 5, 20)
    with pytest.raises(ValueError, match=sentence):
        Problem(Matrix(x), np.arange(len(x)), labels, classes, c)
