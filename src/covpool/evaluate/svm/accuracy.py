"""Top-1 of a network's own classifier and of the SVMs, on images alone and averaged with their mirrors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from covpool.data.image_set import ImageSet
from covpool.evaluate.passes import Pass
from covpool.evaluate.svm.problem import LinearScores
from covpool.evaluate.svm.views import views
from covpool.models.model import PooledClassifier
from covpool.train.processes import Processes


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
        raise ValueError("none of the images to measure on can be used: 'covpool check' tells why")
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
