"""Scores of different classes made comparable, as the bilinear CNNs have it.

Each class's scores are scaled and shifted so that of the training samples its own have the median +1 and the
others the median -1. It stays a linear function of the features.
"""

from __future__ import annotations

import numpy as np

from covpool.evaluate.svm.problem import LinearScores, Problem

# The others' median is taken over so many samples at most, so that memory does not grow with their number.
OTHERS = 50_000


def calibrated(scores: LinearScores, problem: Problem) -> LinearScores:
    """The same SVMs, with medians of +1 and -1; one that does not tell its class apart stays as it is."""
    everyone = np.arange(len(problem))
    own = np.empty(len(problem), dtype=np.float32)
    for some, found in scores.of_samples(problem, everyone):
        own[some] = found[np.arange(len(some)), problem.labels[some]]
    chosen = np.linspace(0, len(problem) - 1, min(len(problem), OTHERS)).astype(np.int64)
    all_scores = np.concatenate([found for _, found in scores.of_samples(problem, chosen)])
    labels = problem.labels[chosen]
    scale, shift = np.ones(problem.classes, np.float32), np.zeros(problem.classes, np.float32)
    for k in range(problem.classes):
        high = np.median(own[problem.labels == k])
        low = np.median(all_scores[labels != k, k])
        if high > low:
            scale[k] = 2 / (high - low)
            shift[k] = 1 - scale[k] * high
    return LinearScores(scores.weights * scale[:, None], scores.bias * scale + shift)
