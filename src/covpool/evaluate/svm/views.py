"""What a network makes of an image and of its mirror image, in one pass of its backbone for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from covpool.data.batch import BadImage, Batch
from covpool.data.image_set import ImageSet
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.evaluate.passes import Pass, channels_last
from covpool.models.head import unit
from covpool.models.model import PooledClassifier
from covpool.train.precision import autocast
from covpool.train.processes import Processes

VIEWS = 2


@dataclass(frozen=True, eq=False)
class Views:
    """Of a batch.

    Attributes:
        ids: ``(B,)``, the images' numbers in the set.
        labels: ``(B,)``.
        features: ``(B, 2, v)``: of each image and its mirror image, what the classifier receives, of length
            one; of a joined model, each of the two parts of length one.
        logits: ``(B, 2, k)``, of the network's own classifier; ``None`` where it has none.
        bad: images that could not be used.
    """

    ids: Tensor
    labels: Tensor
    features: Tensor
    logits: Tensor | None
    bad: list[BadImage]


def views(model: PooledClassifier, images: ImageSet, passing: Pass, processes: Processes) -> Iterator[Views]:
    """Both views of every image of a set that can be used, in its order.

    Raises:
        ValueError: where the network's numbers are not finite.
    """
    model = model.eval().to(processes.device)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
    for batch in passing.batches(images, transform, processes):
        made = _views(model, batch, passing.precision, processes.device)
        _check_finite(made, images, passing.precision)
        yield made


def _check_finite(made: Views, images: ImageSet, precision: str) -> None:
    """At the first such batch: what follows would be of no use."""
    for what, numbers in (("features", made.features), ("logits", made.logits)):
        if numbers is None or not len(made.ids):
            continue
        wrong = made.ids[~numbers.isfinite().flatten(1).all(dim=1)]
        if len(wrong):
            raise ValueError(
                f"the {what} of {len(wrong)} images of a batch are not finite in {precision}, first of "
                f"{images.name(int(wrong[0]))}: try --precision float32, or train anew"
            )


@torch.inference_mode()
def _views(model: PooledClassifier, batch: Batch, precision: str, device: torch.device) -> Views:
    if not len(batch.ids):
        return Views(batch.ids, batch.labels, torch.empty(0), None, list(batch.bad))
    both = channels_last(torch.cat([batch.images, batch.images.flip(-1)]).to(device, non_blocking=True))
    with autocast(device, precision):
        maps = model.forward_features(both)
        vector, first = model.forward_pool(maps), model.forward_first_order(maps)
        received = model.classify(vector, first, pre_logits=True)
        logits = model.classify(vector, first) if model.num_classes else None
    return Views(
        ids=batch.ids,
        labels=batch.labels,
        features=_by_image(unit_parts(model, received)),
        logits=None if logits is None else _by_image(logits),
        bad=list(batch.bad),
    )


def unit_parts(model: PooledClassifier, received: Tensor) -> Tensor:
    """What the second-order and, if there is one, the first-order classifier receives, each of length one."""
    second = model.head.hidden_size
    parts = [received[:, :second], received[:, second:]]
    return torch.cat([unit(part.float()) for part in parts if part.shape[1]], dim=1)


def _by_image(x: Tensor) -> Tensor:
    """All images and then all mirror images, as pairs."""
    pairs: Tensor = x.float().cpu().unflatten(0, (VIEWS, -1)).transpose(0, 1)
    return pairs
