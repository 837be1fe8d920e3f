"""Compute predictions and metrics from the logits of a set of images.

Predictions are gathered from all processes first, so a metric does not depend on their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from covpool.errors import UsageError

if TYPE_CHECKING:  # recipes list the metrics, and must be quick to import
    from covpool.data.loader import BadImage
    from covpool.inference.forward import Result
    from covpool.processes import Processes

TOP = 5


@dataclass(frozen=True, eq=False)
class Predictions:
    """The predictions of all images, in the order of the set; arrays of one length.

    Attributes:
        ids: the index of the image in the set.
        labels: the class of the image.
        predicted: the class of the highest logit.
        confidence: the probability of the predicted class.
        label_confidence: the probability of the image's own class.
        losses: the cross-entropy.
        in_top5: whether the image's class is among the top-5 predictions.
    """

    ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]
    confidence: NDArray[np.float32]
    label_confidence: NDArray[np.float32]
    losses: NDArray[np.float32]
    in_top5: NDArray[np.bool_]


class Counts(NamedTuple):
    """Sums over the images of a set, from which metrics are computed.

    The arrays may have a last axis R more, for the resamples of a bootstrap.

    Attributes:
        images: the number of images.
        right: images whose predicted class is right.
        in_top5: images whose class is among the top-5 predictions.
        hits: ``(K,)``, images of each class whose predicted class is right.
        of_class: ``(K,)``, images of each class.
        called: ``(K,)``, images predicted as each class.
    """

    images: int
    right: Any
    in_top5: Any
    hits: Any
    of_class: Any
    called: Any


def _mean_over_classes(parts: Any, wholes: Any) -> Any:
    """Return the mean of parts / wholes over the classes whose whole is not empty."""
    is_there = wholes > 0
    shares = np.divide(parts, wholes, out=np.zeros(np.shape(parts)), where=is_there)
    return shares.sum(axis=0) / is_there.sum(axis=0)


class Metric(NamedTuple):
    """A metric, a fraction from 0 to 1.

    Attributes:
        title: its name in tables.
        of: computes it from the counts.
    """

    title: str
    of: Callable[[Counts], Any]


# To add a metric, add a line. Training, evaluation, reports and recipes use this table.
METRICS = {
    "top1": Metric("top-1", lambda n: n.right / n.images),
    "top5": Metric("top-5", lambda n: n.in_top5 / n.images),
    # Classes that have images or predictions.
    "macro_f1": Metric("macro-F1", lambda n: _mean_over_classes(2 * n.hits, n.of_class + n.called)),
    "balanced_accuracy": Metric("balanced accuracy", lambda n: _mean_over_classes(n.hits, n.of_class)),
}
Metrics = dict[str, Any]


def widest_interval(images: int) -> float:
    """Return half the width of a 95 % interval of an accuracy of 50 %, in points: that of others is less."""
    return float(98 / images**0.5)


def predict(
    results: Iterable[Result], processes: Processes, is_stopped: Callable[[], bool] = lambda: False
) -> tuple[Predictions, list[BadImage]] | None:
    """Return the predictions of all processes, in every process, and the unreadable images.

    Args:
        results: the ``logits`` of this process's batches; several views are averaged.
        processes: share the images of the set.
        is_stopped: whether the loop was interrupted. If it was in one process, all return ``None``.
    """
    parts: list[Predictions] = []
    bad: list[BadImage] = []

    def predict_all() -> None:
        for result in results:
            bad.extend(result.bad)
            if len(result.ids):
                parts.append(predictions_of(result))

    processes.together(predict_all)
    return gather_predictions(parts, bad, processes, is_stopped())


def gather_predictions(
    parts: list[Predictions], bad: list[BadImage], processes: Processes, is_stopped: bool
) -> tuple[Predictions, list[BadImage]] | None:
    """Return the predictions of all processes in every process; ``None`` if one of them was stopped."""
    gathered = processes.gather((parts, bad, is_stopped))
    if any(stopped for _, _, stopped in gathered):
        return None
    return (
        join_predictions([part for parts, _, _ in gathered for part in parts]),
        [image for _, bad, _ in gathered for image in bad],
    )


def predictions_of(result: Result) -> Predictions:
    """Return the predictions of a batch from its ``logits``; several views are averaged."""
    logits_BK, labels = result.outputs["logits"].mean(dim=0), torch.from_numpy(result.labels)
    probabilities = logits_BK.softmax(dim=1)
    confidence, predicted = probabilities.max(dim=1)
    labels_B1 = labels[:, None]
    # Ties count as argmax breaks them: of equal logits, the first class is the highest.
    same, first = logits_BK == logits_BK.gather(1, labels_B1), torch.arange(logits_BK.shape[1]) < labels_B1
    above = ((logits_BK > logits_BK.gather(1, labels_B1)) | (same & first)).sum(dim=1)
    return Predictions(
        ids=result.ids,
        labels=result.labels,
        predicted=predicted.numpy(),
        confidence=confidence.numpy(),
        label_confidence=probabilities.gather(1, labels_B1)[:, 0].numpy(),
        losses=F.cross_entropy(logits_BK, labels, reduction="none").numpy(),
        in_top5=((above < TOP) & ~logits_BK.isnan().any(dim=1)).numpy(),
    )


def join_predictions(parts: list[Predictions]) -> Predictions:
    """Concatenate the parts in the order of the set."""
    if not parts:
        whole, real = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
        return Predictions(whole, whole, whole, real, real, real, np.zeros(0, dtype=bool))
    order = np.argsort(np.concatenate([part.ids for part in parts]), kind="stable")
    names = [field.name for field in fields(Predictions)]
    return Predictions(**{n: np.concatenate([getattr(part, n) for part in parts])[order] for n in names})


def measure(predictions: Predictions, classes: int) -> Metrics:
    """Return the mean cross-entropy ``loss``, every metric of :data:`METRICS`, and the number of ``images``.

    Raises:
        ValueError: if no image is readable.
    """
    n = len(predictions.ids)
    if n == 0:
        raise UsageError("no image is readable, so there is nothing to measure: run 'covpool check'")
    right = predictions.labels == predictions.predicted
    counts = Counts(
        n,
        int(right.sum()),
        int(predictions.in_top5.sum()),
        hits=np.bincount(predictions.labels[right], minlength=classes),
        of_class=np.bincount(predictions.labels, minlength=classes),
        called=np.bincount(predictions.predicted, minlength=classes),
    )
    loss = math.fsum(predictions.losses.tolist()) / n  # exact, whatever the order
    return {"loss": loss, **{name: float(metric.of(counts)) for name, metric in METRICS.items()}, "images": n}
