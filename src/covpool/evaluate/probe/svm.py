"""Linear SVMs on the vectors of a trained head: the fine-grained protocol, on features that are there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covpool.evaluate.probe.cache import VIEWS, CachedFeatures
from covpool.evaluate.probe.training import head_outputs
from covpool.evaluate.svm.in_memory import bytes_in_memory, solve_in_memory
from covpool.evaluate.svm.problem import LinearScores, Problem
from covpool.evaluate.svm.streaming import solve_streaming
from covpool.evaluate.svm.views import unit_parts
from covpool.models.model import PooledClassifier

# Rows × columns × classes from which on the solver that streams is the quicker one: it solves all classes at
# once, and at the size of CUB-200-2011 takes a sixth of LinearSVC's time.
LARGE = 5e9
MAX_MEMORY = 8e9  # bytes


@dataclass(frozen=True, eq=False)
class _Array:
    """Rows in memory, as :class:`covpool.evaluate.svm.problem.Rows` has them."""

    values: NDArray[np.float32]

    @property
    def columns(self) -> int:
        return int(self.values.shape[1])

    def read(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        return self.values[numbers]


def fit_svms(model: PooledClassifier, train: CachedFeatures, scratch: Path) -> LinearScores:
    """One for each class, of the training images and their mirrors; ``scratch`` is a folder to work in."""
    vectors = unit_vectors(model, train).flatten(0, 1).numpy()
    labels = np.tile(train.labels[train.usable], VIEWS)
    problem = Problem(_Array(vectors), np.arange(len(vectors)), labels, model.num_classes)
    is_small = bytes_in_memory(*vectors.shape) < MAX_MEMORY and vectors.size * model.num_classes < LARGE
    if is_small:
        return solve_in_memory(problem)
    return solve_streaming(problem, scratch)


def svm_scores(model: PooledClassifier, scores: LinearScores, test: CachedFeatures) -> Tensor:
    """Of the usable images and their mirrors, ``(views, images, classes)``."""
    return torch.stack([torch.from_numpy(scores.of(view.numpy())) for view in unit_vectors(model, test)])


def unit_vectors(model: PooledClassifier, cached: CachedFeatures) -> Tensor:
    """``(views, images, v)``, of length one."""
    received = torch.cat(
        [part for _, part in head_outputs(model, cached, cached.usable, pre_logits=True)], dim=1
    )
    return unit_parts(model, received.flatten(0, 1)).unflatten(0, received.shape[:2])  # type: ignore[no-any-return]
