"""Solve one-vs-all linear SVMs, in memory or streaming from disk.

The loss is the squared hinge of scikit-learn's LinearSVC. The intercept is the weight of a feature that is
always 1, so it is regularized like the other weights.

**In memory.** With fewer samples than features, a rotation makes the problem smaller and keeps its solution:
regularizer and scores depend only on products of samples, and the rows of L, from the Cholesky factorization
G = L·Lᵀ of these products, have the same products. Weights w' for L are weights w = Xᵀ·L⁻ᵀ·w' for X. Equal
samples make G singular, so 1e-10 is added to its diagonal.

**Streaming.** Block minimization of the dual (Yu, Hsieh, Chang and Lin, "Large linear classification when
data cannot fit in memory", 2010), for all classes at once. The dual has a value α ≥ 0 per sample and class,
and weights w = Σ α·y·x. A pass reads the samples in random order, one block at a time, and improves their α
by coordinate descent on the block's products. Memory holds the weights, one block and the labels; the α are
in a file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import scipy.linalg
from numpy.typing import NDArray
from sklearn.svm import LinearSVC

from covpool.errors import UsageError
from covpool.inference.store import RowFile
from covpool.storage.folders import scratch_folder

# Rows scored at a time.
CHUNK = 1024


class Rows(Protocol):
    """A matrix read by rows, in memory or on disk, such as :class:`covpool.inference.store.RowFile`."""

    @property
    def columns(self) -> int:
        """Length of each row."""

    def read(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the rows with these indices, in this order."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Training samples and their classes.

    Attributes:
        rows: the features.
        numbers: row index of each sample.
        labels: class of each sample, from 0.
        classes: number of classes.
        c: weight of the losses; the weight of the regularizer is ½.
    """

    rows: Rows
    numbers: NDArray[np.int64]
    labels: NDArray[np.int64]
    classes: int
    c: float = 1.0

    def __post_init__(self) -> None:
        if self.classes < 2:
            raise UsageError(f"an SVM needs at least 2 classes; got {self.classes}")
        check_c(self.c)
        counts = np.bincount(self.labels, minlength=self.classes)
        if lacking := np.flatnonzero(counts == 0).tolist():
            raise UsageError(
                f"{len(lacking)} classes have no readable training image, first class {lacking[0]}"
            )

    def __len__(self) -> int:
        return len(self.numbers)

    def signs(self, indices: NDArray[np.int64] | slice) -> NDArray[np.float32]:
        """Return 1 for a sample's own class and -1 for the others, ``(samples, classes)``."""
        is_label = self.labels[indices, None] == np.arange(self.classes)
        return np.where(is_label, np.float32(1), np.float32(-1))


def check_c(c: float) -> None:
    """Raise unless C is positive."""
    if not c > 0:
        raise UsageError(f"C must be above 0; got {c}")


@dataclass(frozen=True, eq=False)
class LinearScores:
    """Scores ``x @ weights.T + bias``.

    Attributes:
        weights: ``(classes, columns)``.
        bias: ``(classes,)``.
    """

    weights: NDArray[np.float32]
    bias: NDArray[np.float32]

    def of(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the scores of some rows."""
        scores: NDArray[np.float32] = x @ self.weights.T + self.bias
        return scores

    def of_samples(
        self, problem: Problem, indices: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Yield indices and scores of some samples, a chunk at a time."""
        for first in range(0, len(indices), CHUNK):
            some = indices[first : first + CHUNK]
            yield some, self.of(problem.rows.read(problem.numbers[some]))


TOLERANCE_IN_MEMORY = 1e-6
MAX_ITERATIONS = 10_000
DIAGONAL = 1e-10
# Columns multiplied at a time, in float64.
COLUMNS = 2048


def bytes_in_memory(samples: int, columns: int) -> int:
    """Return the peak memory of :func:`solve_in_memory`; liblinear stores 16 bytes per nonzero value."""
    features = 4 * samples * columns
    if samples < columns:
        return features + 8 * samples * min(COLUMNS, columns) + (8 + 8 + 8) * samples**2
    return features + (8 + 16) * samples * columns


def solve_in_memory(problem: Problem) -> LinearScores:
    """Fit one SVM per class, with all samples in memory."""
    x = problem.rows.read(problem.numbers)
    if len(x) >= x.shape[1]:
        weights, bias = _fit(x.astype(np.float64), problem)
    else:
        factor = _triangular(x)
        rotated, bias = _fit(factor, problem)
        # L⁻ᵀ·w' are the coefficients of the samples in the weights.
        parts = scipy.linalg.solve_triangular(factor, rotated.T, lower=True, trans="T", check_finite=False)
        weights = _combined(parts, x)
    return LinearScores(weights.astype(np.float32), bias.astype(np.float32))


def _fit(x: NDArray[np.float64], problem: Problem) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    svm = LinearSVC(C=problem.c, dual=True, tol=TOLERANCE_IN_MEMORY, max_iter=MAX_ITERATIONS, random_state=0)
    svm.fit(x, problem.labels)
    weights, bias = svm.coef_, svm.intercept_
    if problem.classes == 2:  # LinearSVC fits one SVM; the other class has the negated weights
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
    """Return the weights ``partsᵀ @ x`` in float64."""
    weights = np.empty((parts.shape[1], x.shape[1]))
    for first in range(0, x.shape[1], COLUMNS):
        columns = slice(first, first + COLUMNS)
        weights[:, columns] = parts.T @ x[:, columns].astype(np.float64)
    return weights


LOGGER = logging.getLogger("covpool")

BLOCK = 512
# Sweeps of coordinate descent per block; with one, three times as many passes are needed.
SWEEPS = 5
# Largest violation of a sample's optimality condition, in units of the margin.
TOLERANCE_STREAMING = 1e-3
MAX_PASSES = 100
# Prefix of the temporary folder for the α, and their file in it.
FOLDER, ALPHAS = "svm-", "alphas.npy"


def solve_streaming(
    problem: Problem,
    scratch: str | Path,
    *,
    tolerance: float = TOLERANCE_STREAMING,
    passes: Callable[[int, float], None] = lambda done, violation: None,
) -> LinearScores:
    """Fit one SVM per class, streaming the samples from disk.

    Args:
        problem: the samples.
        scratch: folder with space for one float per sample and class.
        tolerance: largest violation at which to stop.
        passes: called after each pass with the number of passes and the largest violation in it.

    Raises:
        ValueError: if scores are not finite, because features are not.
    """
    random = np.random.default_rng(0)
    columns = problem.rows.columns + 1  # the last is always 1: its weight is the bias
    weights = np.zeros((problem.classes, columns), dtype=np.float32)
    with scratch_folder(Path(scratch), FOLDER) as folder:
        alphas = RowFile.create(folder / ALPHAS, len(problem), problem.classes)
        for done in range(1, MAX_PASSES + 1):
            violation = _one_pass(problem, weights, alphas, random)
            passes(done, violation)
            if violation <= tolerance:
                break
        else:
            LOGGER.warning("no convergence in %d passes: largest violation %.1e", MAX_PASSES, violation)
    return LinearScores(weights[:, :-1].copy(), weights[:, -1].copy())


def left_behind(scratch: Path) -> list[Path]:
    """Return the temporary folders of solvers that were killed."""
    return [
        path for path in scratch.glob(f"{FOLDER}*") if path.is_dir() and set(os.listdir(path)) <= {ALPHAS}
    ]


def _one_pass(
    problem: Problem, weights: NDArray[np.float32], alphas: RowFile, random: np.random.Generator
) -> float:
    """Update weights and alphas in place; return the largest violation."""
    order, worst = random.permutation(len(problem)), 0.0
    for first in range(0, len(order), BLOCK):
        indices = np.sort(order[first : first + BLOCK])  # sequential reads are fastest on disk
        features = problem.rows.read(problem.numbers[indices])
        x = np.concatenate([features, np.ones((len(features), 1), dtype=np.float32)], axis=1)
        signs, alpha = problem.signs(indices), alphas.read(indices)
        before = alpha.copy()
        with np.errstate(invalid="ignore", over="ignore"):  # reported below
            scores = x @ weights.T
            gradient = signs * scores - 1 + alpha / (2 * problem.c)
        if not np.isfinite(gradient).all():  # comparisons with NaN are always false
            raise UsageError(
                "the SVM scores are not finite: delete the cached features and rerun the command"
            )
        worst = max(worst, float(np.where(alpha > 0, np.abs(gradient), -gradient).max()))
        _descend(alpha, scores, signs, x @ x.T, problem.c, random)
        alphas.write(indices, alpha)
        weights += ((alpha - before) * signs).T @ x
    return worst


def _descend(
    alpha: NDArray[np.float32],
    scores: NDArray[np.float32],
    signs: NDArray[np.float32],
    products: NDArray[np.float32],
    c: float,
    random: np.random.Generator,
) -> None:
    """Run coordinate descent on a block's alphas, for all classes at once; update alphas and scores."""
    softness = np.float32(1 / (2 * c))
    curvature = products.diagonal() + softness
    for _ in range(SWEEPS):
        for i in random.permutation(len(alpha)):
            gradient = signs[i] * scores[i] - 1 + alpha[i] * softness
            new = np.maximum(alpha[i] - gradient / curvature[i], 0)
            change = (new - alpha[i]) * signs[i]
            alpha[i] = new
            moved = np.flatnonzero(change)
            if 8 * len(moved) < len(change):  # after a few sweeps most alphas stay at 0
                scores[:, moved] += np.outer(products[i], change[moved])
            else:
                scores += np.outer(products[i], change)
