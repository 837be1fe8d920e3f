"""scikit-learn's LinearSVC, on features that fit into memory.

The loss is the squared hinge, LinearSVC's own, and the intercept is the weight of a feature that is always 1,
so it is regularised as the other weights are. The dual is solved, to a tolerance at which scores are settled
to 1e-5.

Where there are fewer samples than features, as there are for every fine-grained set at 32,896 features, a
rotation makes the problem smaller and leaves its solution as it is: regulariser and scores depend on products
of samples alone, and the rows of L, from the Cholesky factorisation G = L·Lᵀ of the samples' products, have
the same. L is triangular, so LinearSVC sees no more than half of samples² numbers. Weights w' for L are
weights w = Xᵀ·L⁻ᵀ·w' for X. Equal samples make G singular, so 1e-10 is added to its diagonal; in the dual of
the squared hinge that diagonal has 1/(2C) more anyway.
"""

from __future__ import annotations

import numpy as np
import scipy.linalg
from numpy.typing import NDArray
from sklearn.svm import LinearSVC

from covpool.evaluate.svm.problem import LinearScores, Problem

TOLERANCE = 1e-6
MAX_ITERATIONS = 10_000
DIAGONAL = 1e-10
# Columns of which products are taken at a time, in float64.
COLUMNS = 2048


def bytes_in_memory(samples: int, columns: int) -> int:
    """What :func:`solve_in_memory` takes at most: liblinear keeps 16 bytes for every number that is not 0."""
    features = 4 * samples * columns
    if samples < columns:
        return features + 8 * samples * min(COLUMNS, columns) + (8 + 8 + 8) * samples**2
    return features + (8 + 16) * samples * columns


def solve_in_memory(problem: Problem) -> LinearScores:
    """One SVM a class, of all samples at once."""
    x = problem.rows.read(problem.numbers)
    if len(x) >= x.shape[1]:
        weights, bias = _fit(x.astype(np.float64), problem)
    else:
        factor = _triangular(x)
        rotated, bias = _fit(factor, problem)
        # L⁻ᵀ·w' is how much of each sample the weights are.
        parts = scipy.linalg.solve_triangular(factor, rotated.T, lower=True, trans="T", check_finite=False)
        weights = _combined(parts, x)
    return LinearScores(weights.astype(np.float32), bias.astype(np.float32))


def _fit(x: NDArray[np.float64], problem: Problem) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    svm = LinearSVC(C=problem.c, dual=True, tol=TOLERANCE, max_iter=MAX_ITERATIONS, random_state=0)
    svm.fit(x, problem.labels)
    weights, bias = svm.coef_, svm.intercept_
    if problem.classes == 2:  # it fits one, as that of the first class is its opposite
        weights, bias = np.concatenate([-weights, weights]), np.concatenate([-bias, bias])
    return weights, bias


def _triangular(x: NDArray[np.float32]) -> NDArray[np.float64]:
    products = np.zeros((len(x), len(x)), dtype=np.float64)
    for first in range(0, x.shape[1], COLUMNS):
        part = x[:, first : first + COLUMNS].astype(np.float64)
        products += part @ part.T
    products[np.diag_indices_from(products)] += DIAGONAL
    return np.linalg.cholesky(products).astype(np.float64, copy=False)


def _combined(parts: NDArray[np.float64], x: NDArray[np.float32]) -> NDArray[np.float64]:
    """Weights ``partsᵀ @ x``, in float64."""
    weights = np.empty((parts.shape[1], x.shape[1]))
    for first in range(0, x.shape[1], COLUMNS):
        columns = slice(first, first + COLUMNS)
        weights[:, columns] = parts.T @ x[:, columns].astype(np.float64)
    return weights
