"""SVMs of features that do not fit into memory: what LinearSVC minimises, a block of rows at a time.

It is block minimisation of the dual (Yu, Hsieh, Chang and Lin, 2010: "Large linear classification when data
cannot fit in memory"), for all classes at once. The dual of the squared hinge has a number α ≥ 0 for every
sample and class, and weights w = Σ α·y·x. A pass takes the samples in a random order, a block at a time:
reads their features, and improves their α, the others being held, by coordinate descent on the block's
products G = X·Xᵀ, which needs the features no more. Scores S = X·Wᵀ before and a correction of W after are
the other two products of a block.

In memory are the weights, a block, and the labels; the α lie in a file of their own, of a number a sample and
class.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from covpool.evaluate.svm.problem import LinearScores, Problem
from covpool.evaluate.svm.rows import RowFile

LOGGER = logging.getLogger("covpool")

BLOCK = 512
# Of coordinate descent within a block: with one it takes three times as many passes.
SWEEPS = 5
# The largest violation of a sample's condition of optimality, in units of the margin.
TOLERANCE = 1e-3
MAX_PASSES = 100
# The beginning of the name of a folder for the α, and their file in it.
FOLDER, ALPHAS = "svm-", "alphas.npy"


def solve_streaming(
    problem: Problem,
    scratch: str | Path,
    *,
    tolerance: float = TOLERANCE,
    passes: Callable[[int, float], None] = lambda done, violation: None,
) -> LinearScores:
    """One SVM a class.

    Args:
        problem: the samples.
        scratch: a folder with room for a number for each sample and class.
        tolerance: at which to stop.
        passes: told after each pass how many there were, and the largest violation met in it.

    Raises:
        ValueError: if scores are not finite, as those of features that are not.
    """
    random = np.random.default_rng(0)
    columns = problem.rows.columns + 1  # the last is always 1: its weight is the bias
    weights = np.zeros((problem.classes, columns), dtype=np.float32)
    with tempfile.TemporaryDirectory(dir=scratch, prefix=FOLDER) as folder:
        alphas = RowFile.create(Path(folder, ALPHAS), len(problem), problem.classes)
        for done in range(1, MAX_PASSES + 1):
            violation = _one_pass(problem, weights, alphas, random)
            passes(done, violation)
            if violation <= tolerance:
                break
        else:
            LOGGER.warning("after %d passes the SVMs are not settled yet: %.1e", MAX_PASSES, violation)
    return LinearScores(weights[:, :-1].copy(), weights[:, -1].copy())


def left_behind(scratch: Path) -> list[Path]:
    """The folders of solvers that were killed."""
    return [
        path for path in scratch.glob(f"{FOLDER}*") if path.is_dir() and set(os.listdir(path)) <= {ALPHAS}
    ]


def _one_pass(
    problem: Problem, weights: NDArray[np.float32], alphas: RowFile, random: np.random.Generator
) -> float:
    """Change weights and alphas; the largest violation that was met."""
    order, worst = random.permutation(len(problem)), 0.0
    for first in range(0, len(order), BLOCK):
        places = np.sort(order[first : first + BLOCK])  # on a disk, forward is fastest
        features = problem.rows.read(problem.numbers[places])
        x = np.concatenate([features, np.ones((len(features), 1), dtype=np.float32)], axis=1)
        signs, alpha = problem.signs(places), alphas.read(places)
        before = alpha.copy()
        with np.errstate(invalid="ignore", over="ignore"):  # it is told in a sentence
            scores = x @ weights.T
            gradient = signs * scores - 1 + alpha / (2 * problem.c)
        if not np.isfinite(gradient).all():  # no comparison would tell
            raise ValueError("the scores of the SVMs are not finite: delete the features, and make them anew")
        worst = max(worst, float(np.where(alpha > 0, np.abs(gradient), -gradient).max()))
        _descend(alpha, scores, signs, x @ x.T, problem.c, random)
        alphas.write(places, alpha)
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
    """Coordinate descent on a block's alphas, each sample's for all classes at once, with their scores."""
    softness = np.float32(1 / (2 * c))
    curvature = products.diagonal() + softness
    for _ in range(SWEEPS):
        for i in random.permutation(len(alpha)):
            gradient = signs[i] * scores[i] - 1 + alpha[i] * softness
            new = np.maximum(alpha[i] - gradient / curvature[i], 0)
            change = (new - alpha[i]) * signs[i]
            alpha[i] = new
            moved = np.flatnonzero(change)
            if 8 * len(moved) < len(change):  # soon most stay at 0
                scores[:, moved] += np.outer(products[i], change[moved])
            else:
                scores += np.outer(products[i], change)
