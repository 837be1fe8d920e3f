"""What a network makes of an image and of its mirror image, in one pass of its backbone for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from covpool.data.batch import BadImage, Batch
from covpool.data.image_set import ImageSet
from covpool.data.loader import EvaluationLoader
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.functional.arguments import check_choice, check_whole
from covpool.models.head import unit
from covpool.models.model import PooledClassifier
from covpool.train.precision import autocast

VIEWS = 2
Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Passing:
    """How images go through a network.

    Attributes:
        batch_size: images at a time; their mirror images come on top.
        workers: processes that load images.
        precision: of autocast: ``"float32"`` or ``"bfloat16"``.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"`` for a GPU if there is one.
    """

    batch_size: int = 32
    workers: int = 0
    precision: Precision = "float32"
    device: str = "auto"

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, ("float32", "bfloat16"))
        check_choice("device", self.device, ("auto", "cpu", "cuda"))
        check_whole("batch_size", self.batch_size)
        check_whole("workers", self.workers, at_least=0)

    @property
    def place(self) -> torch.device:
        """The device itself."""
        is_cuda = self.device == "cuda" or (self.device == "auto" and torch.cuda.is_available())
        return torch.device("cuda" if is_cuda else "cpu")


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


def views(model: PooledClassifier, images: ImageSet, passing: Passing) -> Iterator[Views]:
    """Both views of every image of a set that can be used, in its order."""
    model = model.eval().to(passing.place)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
    loader = EvaluationLoader(images, transform, batch_size=passing.batch_size, workers=passing.workers)
    for batch in loader:
        yield _views(model, batch, passing)


@torch.inference_mode()
def _views(model: PooledClassifier, batch: Batch, passing: Passing) -> Views:
    count = len(batch.ids)
    if not count:
        return Views(batch.ids, batch.labels, torch.empty(0), None, list(batch.bad))
    both = torch.cat([batch.images, batch.images.flip(-1)])
    both = both.to(passing.place, memory_format=torch.channels_last, non_blocking=True)
    with autocast(passing.place, passing.precision):
        maps = model.forward_features(both)
        vector, first = model.forward_pool(maps), model.forward_first_order(maps)
        received = model.classify(vector, first, pre_logits=True)
        logits = model.classify(vector, first) if model.num_classes else None
    return Views(
        ids=batch.ids,
        labels=batch.labels,
        features=_by_image(torch.cat([unit(part.float()) for part in _parts(model, received)], dim=1)),
        logits=None if logits is None else _by_image(logits),
        bad=list(batch.bad),
    )


def _parts(model: PooledClassifier, received: Tensor) -> list[Tensor]:
    """What the second-order and, if there is one, the first-order classifier receives."""
    second = model.head.hidden_size
    return [received] if received.shape[1] == second else [received[:, :second], received[:, second:]]


def _by_image(x: Tensor) -> Tensor:
    """All images and then all mirror images, as pairs."""
    pairs: Tensor = x.float().cpu().unflatten(0, (VIEWS, -1)).transpose(0, 1)
    return pairs
