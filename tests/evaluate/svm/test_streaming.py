"""The streaming solver minimizes the objective of LinearSVC, in memory that does not grow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from covpool.evaluate.svm.solvers import LinearScores, Problem, solve_in_memory, solve_streaming
from covpool.inference.store import RowFile
from tests.evaluate.svm.samples import Matrix, a_problem, features


def objective(scores: LinearScores, problem: Problem) -> float:
    x = problem.rows.read(problem.numbers)
    margins = problem.signs(slice(None)) * scores.of(x).astype(np.float64)
    squares = (
        np.square(scores.weights, dtype=np.float64).sum() + np.square(scores.bias, dtype=np.float64).sum()
    )
    return float(0.5 * squares + problem.c * np.square(np.maximum(1 - margins, 0)).sum())


@pytest.mark.parametrize(
    ("columns", "c"),
    [
        (50, 0.1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((50, 1.0), (2000, 0.1), (2000, 1.0))),
    ],
)
def test_it_agrees_with_linear_svc(columns: int, c: float, tmp_path: Path) -> None:
    x, labels = features(8, 100, columns)  # more rows than a block
    problem = Problem(Matrix(x), np.arange(len(x)), labels, 8, c)
    new = features(8, 20, columns, seed=1)[0]
    exact, violations = solve_in_memory(problem), []
    found = solve_streaming(problem, tmp_path, passes=lambda done, violation: violations.append(violation))
    np.testing.assert_allclose(found.of(new), exact.of(new), atol=2e-3)
    assert objective(found, problem) == pytest.approx(objective(exact, problem), rel=1e-5)
    assert violations[-1] <= 1e-3 < violations[-2]
    tight = solve_streaming(problem, tmp_path, tolerance=1e-5)
    np.testing.assert_allclose(tight.of(new), exact.of(new), atol=1e-4)
    assert list(tmp_path.iterdir()) == []


def test_from_the_disk_it_is_the_same(tmp_path: Path) -> None:
    problem = a_problem(3, 30, 100)
    file = RowFile.create(tmp_path / "rows.npy", 90, 100)
    file.write(range(90), problem.rows.read(problem.numbers))
    on_disk = Problem(file, problem.numbers, problem.labels, 3)
    found = solve_streaming(on_disk, tmp_path)
    assert np.array_equal(found.weights, solve_streaming(problem, tmp_path).weights)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_features_that_are_not_finite_are_refused(number: float, tmp_path: Path) -> None:
    x, labels = features(3, 30, 100)
    x[17, 4] = number
    problem = Problem(Matrix(x), np.arange(len(x)), labels, 3)
    with pytest.raises(ValueError, match=r"^the SVM scores are not finite"):
        solve_streaming(problem, tmp_path)


@pytest.mark.slow
def test_memory_stays_as_rows_grow_tenfold(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.evaluate.svm.growing", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    few, many = map(float, done.stdout.split())
    grown = 13_500 * 2048 * 4 / 2**20  # MB of features
    assert many - few < 0.05 * grown
