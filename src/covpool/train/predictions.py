"""A network's predictions for every image of a set, gathered from all processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covpool.data.batch import BadImage, Batch
from covpool.device import autocast
from covpool.processes import Processes
from covpool.train.metrics import Predictions

TOP = 5


def predict(
    model: nn.Module,
    batches: Iterable[Batch],
    processes: Processes,
    precision: str = "float32",
    is_stopped: Callable[[], bool] = lambda: False,
) -> tuple[Predictions, list[BadImage]] | None:
    """The predictions for all images, in every process, and the images that could not be used.

    Args:
        model: gives logits; left in the mode it was in.
        batches: this process's, as from :class:`covpool.data.loader.EvaluationLoader`.
        processes: among which the set is divided.
        precision: of autocast.
        is_stopped: asked before every batch. Where a process says yes, all of them return ``None``.
    """
    was_training = model.training
    model.eval()
    parts: list[Predictions] = []
    bad: list[BadImage] = []

    def predict_all() -> None:
        with torch.inference_mode():
            for batch in batches:
                if is_stopped():
                    break
                bad.extend(batch.bad)
                if len(batch.ids) == 0:
                    continue
                images = batch.images.to(processes.device, non_blocking=True)
                with autocast(processes.device, precision):
                    logits = model(images)
                parts.append(_predictions(logits.float().cpu(), batch))

    processes.together(predict_all)
    model.train(was_training)
    gathered = processes.gather((parts, bad, is_stopped()))
    if any(stopped for _, _, stopped in gathered):
        return None
    return (
        _joined([part for parts, _, _ in gathered for part in parts]),
        [image for _, bad, _ in gathered for image in bad],
    )


def _predictions(logits_BK: Tensor, batch: Batch) -> Predictions:
    probabilities = logits_BK.softmax(dim=1)
    confidence, predicted = probabilities.max(dim=1)
    own = batch.labels[:, None]
    # As many classes are above it as have a higher logit, or the same and come first, as argmax has it.
    same, first = logits_BK == logits_BK.gather(1, own), torch.arange(logits_BK.shape[1]) < own
    above = ((logits_BK > logits_BK.gather(1, own)) | (same & first)).sum(dim=1)
    return Predictions(
        ids=batch.ids.numpy(),
        labels=batch.labels.numpy(),
        predicted=predicted.numpy(),
        confidence=confidence.numpy(),
        label_confidence=probabilities.gather(1, own)[:, 0].numpy(),
        losses=F.cross_entropy(logits_BK, batch.labels, reduction="none").numpy(),
        in_top5=((above < TOP) & ~logits_BK.isnan().any(dim=1)).numpy(),
    )


def _joined(parts: list[Predictions]) -> Predictions:
    """In the order of the set."""
    if not parts:
        whole, real = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
        return Predictions(whole, whole, whole, real, real, real, np.zeros(0, dtype=bool))
    order = np.argsort(np.concatenate([part.ids for part in parts]), kind="stable")
    columns = {
        field.name: np.concatenate([getattr(part, field.name) for part in parts])[order]
        for field in dataclasses.fields(Predictions)
    }
    return Predictions(**columns)
