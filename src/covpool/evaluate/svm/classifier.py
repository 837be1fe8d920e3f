"""The classifier of trained SVMs: checks, calibration, accuracy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from covpool.data.image_set import ImageSet
from covpool.errors import UsageError
from covpool.evaluate.svm.features import views
from covpool.evaluate.svm.solvers import LinearScores, Problem
from covpool.inference.forward import Pass
from covpool.models.create import build_model
from covpool.models.model import PooledClassifier
from covpool.processes import Processes
from covpool.wording import counted


def check_every_class(labels: NDArray[np.integer], classes: Sequence[str]) -> None:
    """Raise unless every class has an image that can be used, by the labels of those that can.

    Example:
        >>> check_every_class(np.array([0, 0, 2]), ["auk", "bee", "cat"])
        Traceback (most recent call last):
        ValueError: 1 class has no training image that can be used, first 'bee': there is no SVM of it
    """
    lacking = np.flatnonzero(np.bincount(labels, minlength=len(classes)) == 0)
    if len(lacking):
        has = "has" if len(lacking) == 1 else "have"
        raise UsageError(
            f"{counted(len(lacking), 'class')} {has} no training image that can be used, first "
            f"{classes[lacking[0]]!r}: there is no SVM of it"
        )


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


@dataclass(frozen=True)
class Accuracy:
    """Fractions from 0 to 1 of the images.

    Attributes:
        own: of the network's own classifier; ``None`` where it has none.
        own_flip: with its logits averaged over an image and its mirror image.
        svm: of the SVMs.
        svm_flip: with their scores averaged likewise; the paper's figure.
        images: how many there were.
        left_out: how many could not be used.
    """

    own: float | None
    own_flip: float | None
    svm: float
    svm_flip: float
    images: int
    left_out: int


def measure(
    model: PooledClassifier,
    scores: LinearScores,
    images: ImageSet,
    passing: Pass,
    processes: Processes,
    progress: Callable[[int, int], None],
) -> Accuracy:
    """Both classifiers, in one pass over the images.

    Raises:
        ValueError: if no image can be used, or the network's numbers are not finite.
    """
    right = dict.fromkeys(("own", "own_flip", "svm", "svm_flip"), 0)
    count = left_out = 0
    for made in views(model, images, passing, processes):
        left_out += len(made.bad)
        if len(made.ids):
            count += len(made.ids)
            labels = made.labels.numpy()
            found = {"svm": scores.of(made.features.numpy())}
            if made.logits is not None:
                found["own"] = made.logits.numpy()
            for name, of_views in found.items():
                right[name] += _hits(of_views[:, 0], labels)
                right[f"{name}_flip"] += _hits(of_views.mean(axis=1), labels)
        progress(count + left_out, len(images))
    if not count:
        raise UsageError("none of the images to measure on can be used: 'covpool check' tells why")
    has_own = model.num_classes > 0
    return Accuracy(
        own=right["own"] / count if has_own else None,
        own_flip=right["own_flip"] / count if has_own else None,
        svm=right["svm"] / count,
        svm_flip=right["svm_flip"] / count,
        images=count,
        left_out=left_out,
    )


def _hits(scores: NDArray[np.float32], labels: NDArray[np.int64]) -> int:
    return int((scores.argmax(axis=1) == labels).sum())


def with_svm(model: PooledClassifier, scores: LinearScores, classes: Sequence[str]) -> PooledClassifier:
    """A model of the same backbone, pooling and hidden layers, whose logits are the scores of the SVMs.

    Args:
        model: that made the features.
        scores: of what its classifier receives, of length one (of a joined model, each part).
        classes: the classes' names.
    """
    config = dataclasses.replace(model.config, normalize="l2", num_classes=len(classes))
    with torch.random.fork_rng(devices=[]):
        made = build_model(config)
    weights = torch.from_numpy(scores.weights)
    second = made.head.hidden_size
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    state["head.classifier.weight"] = weights[:, :second].contiguous()
    state["head.classifier.bias"] = torch.from_numpy(scores.bias)
    if made.first_order is not None:
        state["first_order.weight"] = weights[:, second:].contiguous()
    made.load_state_dict(state)
    made.pretrained_cfg = {**model.pretrained_cfg, "num_classes": len(classes)}
    made.classes = tuple(classes)
    return made.eval()
