"""What is solved: one linear SVM for each class, that class against all others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

# Rows that are scored at a time.
CHUNK = 1024


class Rows(Protocol):
    """A matrix by rows, in memory or on disk, as :class:`covpool.evaluate.svm.rows.RowFile`."""

    @property
    def columns(self) -> int:
        """The length of each row."""

    def read(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        """The rows of these numbers, in their order."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Training samples: which rows they are, and their classes.

    Attributes:
        rows: the features.
        numbers: of the rows that are samples.
        labels: the class of each sample, from 0.
        classes: how many there are.
        c: the weight of the losses; the regulariser has ½.
    """

    rows: Rows
    numbers: NDArray[np.int64]
    labels: NDArray[np.int64]
    classes: int
    c: float = 1.0

    def __post_init__(self) -> None:
        if self.classes < 2:
            raise ValueError(f"an SVM tells classes apart, and there are {self.classes}")
        check_c(self.c)
        counts = np.bincount(self.labels, minlength=self.classes)
        if lacking := np.flatnonzero(counts == 0).tolist():
            raise ValueError(
                f"{len(lacking)} classes have no usable training image, first class {lacking[0]}"
            )

    def __len__(self) -> int:
        return len(self.numbers)

    def signs(self, places: NDArray[np.int64] | slice) -> NDArray[np.float32]:
        """1 for a sample's own class and -1 for the others: ``(samples, classes)``."""
        own = self.labels[places, None] == np.arange(self.classes)
        return np.where(own, np.float32(1), np.float32(-1))


def check_c(c: float) -> None:
    """Raise unless losses count for something."""
    if not c > 0:
        raise ValueError(f"C must be above 0; got {c}")


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
        """The scores of some rows."""
        scores: NDArray[np.float32] = x @ self.weights.T + self.bias
        return scores

    def of_samples(
        self, problem: Problem, places: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Some samples, a few at a time, and their scores."""
        for first in range(0, len(places), CHUNK):
            some = places[first : first + CHUNK]
            yield some, self.of(problem.rows.read(problem.numbers[some]))
