"""One head on the features of a frozen backbone: AdamW, one cycle of its rate and momentum, no augmentation.

Images and their mirrors are learned from alike; in the test the logits of the two are averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from covpool.data.randomness import number, permutation
from covpool.evaluate.probe.cache import VIEWS, CachedFeatures
from covpool.evaluate.probe.heads import POOLED_ALREADY
from covpool.evaluate.probe.options import ProbeOptions
from covpool.models.model import PooledClassifier
from covpool.models.parameter_groups import parameter_groups

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
