"""Validate a model whose classifier is divided over the processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from covpool.data.loader import BadImage, Batch
from covpool.device import autocast
from covpool.inference.forward import Forward, Outputs
from covpool.models.model import PooledClassifier
from covpool.nn.divided import DividedLinear, Scores
from covpool.processes import Processes
from covpool.training.metrics import TOP, Predictions, gather_predictions


def predict_together(
    model: PooledClassifier,
    batches: Iterable[Batch],
    processes: Processes,
    precision: str,
    is_stopped: Callable[[], bool],
) -> tuple[Predictions, list[BadImage]] | None:
    """Predict this process's share of a set, and return the predictions of all.

    All processes compute each batch together. A process without images left computes the logits of the
    others.

    Args:
        model: the model, with a :class:`~covpool.nn.divided.DividedLinear`.
        batches: this process's batches.
        processes: the processes that share the set.
        precision: autocast precision.
        is_stopped: called before each batch. If it is true in one process, all return ``None``.
    """
    classifier = model.head.classifier
    assert isinstance(classifier, DividedLinear)

    def embed(images: Tensor) -> Outputs:
        return {"features": model.forward_head(model.forward_features(images), pre_logits=True)}

    forward = Forward(model, embed, device=processes.device, precision=precision)
    parts: list[Predictions] = []
    bad: list[BadImage] = []
    iterator = iter(batches)
    was_training, stopped = model.training, False
    model.eval()
    try:
        while True:
            batch, failure = None, None
            try:
                batch = next(iterator, None)
            except Exception as error:  # the others must not wait for this process
                failure = error
            flags = torch.tensor([batch is not None, failure is not None, is_stopped()], dtype=torch.int64)
            left, failed, stops = processes.sum_(flags).tolist()
            if failed:
                processes.together(functools.partial(_raise, failure))
            stopped = stops > 0
            if stopped or not left:
                break
            if batch is not None:
                bad.extend(batch.bad)
            is_empty = batch is None or not len(batch.ids)
            features = (
                torch.zeros(0, classifier.in_features, device=processes.device)
                if batch is None or is_empty
                else forward(batch.images)["features"][0]
            )
            labels = torch.zeros(0, dtype=torch.int64) if batch is None else batch.labels
            with autocast(processes.device, precision):
                scores = classifier.score(features, labels.to(processes.device), TOP)
            if batch is not None and not is_empty:
                parts.append(_predictions(batch, scores))
    finally:
        model.train(was_training)
    return gather_predictions(parts, bad, processes, stopped)


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def _predictions(batch: Batch, scores: Scores) -> Predictions:
    """Return the predictions of a batch; see :func:`covpool.training.metrics.predictions_of`."""
    losses = scores.log_sum - scores.label_logit
    is_number = scores.log_sum.isfinite()
    return Predictions(
        ids=batch.ids.numpy(),
        labels=batch.labels.numpy(),
        predicted=scores.classes[:, 0].cpu().numpy(),
        confidence=(scores.values[:, 0] - scores.log_sum).exp().float().cpu().numpy(),
        label_confidence=(-losses).exp().float().cpu().numpy(),
        losses=losses.float().cpu().numpy(),
        in_top5=((scores.above < TOP) & is_number).cpu().numpy(),
    )
