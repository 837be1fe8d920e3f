"""Train heads and SVMs on cached features."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from covpool.data.order import number, permutation
from covpool.evaluate.probe.options import POOLED_ALREADY, ProbeOptions
from covpool.evaluate.svm.features import unit_parts
from covpool.evaluate.svm.solvers import (
    LinearScores,
    Problem,
    bytes_in_memory,
    solve_in_memory,
    solve_streaming,
)
from covpool.inference.store import VIEWS, CachedFeatures
from covpool.models.create import parameter_groups
from covpool.models.model import PooledClassifier

EVALUATED_AT_ONCE = 256


@dataclass(frozen=True)
class Rows:
    """Features of some images, some of them mirrored, as the parts of a head take them."""

    arrays: dict[str, Tensor]
    labels: Tensor


def read_rows(
    cached: CachedFeatures,
    model: PooledClassifier,
    ids: NDArray[np.int64],
    views: NDArray[np.int64],
    device: torch.device,
) -> Rows:
    """From disk to the device, and only what the model's head needs of it."""
    needed = _arrays_of(model)
    arrays = {
        name: torch.from_numpy(np.asarray(cached.arrays[name][views, ids])).to(device).float()
        for name in needed
    }
    return Rows(arrays, torch.from_numpy(cached.labels[ids]).to(device))


def vector_of(model: PooledClassifier, rows: Rows) -> tuple[Tensor, Tensor | None]:
    """What the classifier receives of the pooling, and what the joined one receives."""
    pooled, join = POOLED_ALREADY.get(model.config.pool), model.config.join
    vector = model.forward_pool(rows.arrays["features"]) if pooled is None else rows.arrays[pooled]
    return vector, None if join is None else rows.arrays[POOLED_ALREADY[join]]


def fit_head(
    model: PooledClassifier,
    cached: CachedFeatures,
    ids: NDArray[np.int64],
    options: ProbeOptions,
    seed: int,
    progress: Callable[[int, int], None],
) -> None:
    """Train all of a model but its backbone, on the images ``ids``.

    The order of the images depends on the seed alone, and so does dropout.
    """
    device = next(model.parameters()).device
    model.freeze("backbone")
    batch_size = min(options.batch_size, VIEWS * len(ids))
    steps = options.epochs * (VIEWS * len(ids) // batch_size)
    groups = parameter_groups(
        model, options.lr, weight_decay=options.weight_decay, classifier_factor=1.0, decay_norms=False
    )
    optimizer = AdamW(groups, fused=True)
    schedule = OneCycleLR(optimizer, [options.lr] * len(groups), total_steps=max(steps, 2))
    torch.manual_seed(number("probe", seed))
    model.train()
    for step, (some, views) in enumerate(_batches(ids, batch_size, options.epochs, seed)):
        rows = read_rows(cached, model, some, views, device)
        logits = model.classify(*vector_of(model, rows))
        loss = F.cross_entropy(logits, rows.labels, label_smoothing=options.label_smoothing)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        progress(step + 1, steps)
    model.eval()


def head_outputs(
    model: PooledClassifier, cached: CachedFeatures, ids: NDArray[np.int64], *, pre_logits: bool = False
) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
    """Some of the images at a time: all logits of many classes would not fit into memory.

    Yields:
        Which, and of them and their mirrors, ``(views, images, classes)``, the logits, or what the
        classifiers receive.
    """
    device = next(model.parameters()).device
    model.eval()
    for start in range(0, len(ids), EVALUATED_AT_ONCE):
        some, found = ids[start : start + EVALUATED_AT_ONCE], []
        with torch.no_grad():
            for view in range(VIEWS):
                rows = read_rows(cached, model, some, np.full(len(some), view), device)
                found.append(model.classify(*vector_of(model, rows), pre_logits).cpu())
        yield some, torch.stack(found)


def _arrays_of(model: PooledClassifier) -> set[str]:
    needed = {POOLED_ALREADY.get(model.config.pool, "features")}
    return needed | ({POOLED_ALREADY[model.config.join]} if model.config.join is not None else set())


def _batches(
    ids: NDArray[np.int64], batch_size: int, epochs: int, seed: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Images and views, every one once an epoch, a remainder left out."""
    for epoch in range(epochs):
        order = permutation(VIEWS * len(ids), "probe order", seed, epoch)
        for start in range(0, len(order) - batch_size + 1, batch_size):
            some = order[start : start + batch_size]
            yield ids[some % len(ids)], some // len(ids)


# Rows × columns × classes from which on the solver that streams is the quicker one: it solves all classes at
# once, and at the size of CUB-200-2011 takes a sixth of LinearSVC's time.
LARGE = 5e9
MAX_MEMORY = 8e9  # bytes


@dataclass(frozen=True, eq=False)
class _Array:
    """Rows in memory, as :class:`covpool.evaluate.svm.solvers.Rows` has them."""

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
