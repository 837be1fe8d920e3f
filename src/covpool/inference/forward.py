"""Put the images of a set through a network in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from covpool.data.batch import Batch, Transform
from covpool.data.image_set import ImageSet, Relabelled
from covpool.data.loader import EvaluationLoader
from covpool.data.sources import open_images
from covpool.errors import UsageError
from covpool.functional.arguments import check_choice, check_whole
from covpool.models.bundle import load_model
from covpool.models.model import PooledClassifier
from covpool.processes import Processes
from covpool.wording import counted

PRECISIONS = ("float32", "bfloat16", "float16")
ProgressCall = Callable[[int, int], None]


def open_bundle(path: str, device: torch.device) -> PooledClassifier:
    """The model of a bundle; with the channels last, convolutions are up to twice as fast on a CPU."""
    model = load_model(path, device=device)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def channels_last(images_B3HW: Tensor) -> Tensor:
    """The same images, in the memory format of the model."""
    return images_B3HW.contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True)
class Pass:
    """How images go through a network.

    Attributes:
        batch_size: of each process.
        workers: processes that read images, for each process.
        precision: of autocast.
        progress: called with the images done and those there are; ``None`` for nobody.
    """

    batch_size: int
    workers: int
    precision: str
    progress: ProgressCall | None

    def __post_init__(self) -> None:
        check_whole("batch_size", self.batch_size)
        check_whole("workers", self.workers, at_least=0)
        check_choice("precision", self.precision, PRECISIONS)

    def described(self) -> dict[str, Any]:
        """For the results."""
        return {"batch_size": self.batch_size, "workers": self.workers, "precision": self.precision}

    def batches(self, images: ImageSet, transform: Transform, processes: Processes) -> Iterator[Batch]:
        """This process's batches of a set. Progress is told of all, as if the others were as far."""
        loader = EvaluationLoader(
            images,
            transform,
            batch_size=self.batch_size,
            rank=processes.rank,
            world_size=processes.world_size,
            workers=self.workers,
        )
        done = 0
        for batch in loader:
            yield batch
            done += (len(batch.ids) + len(batch.bad)) * processes.world_size
            if self.progress is not None and processes.is_first:
                self.progress(min(done, len(images)), len(images))


def open_split(model: PooledClassifier, path: str, split: str, layout: str = "auto") -> ImageSet:
    """The images of a split, with the model's classes, once it is clear that it knows theirs.

    The split need not have images of every class, nor its classes the model's order.

    Args:
        model: of a bundle.
        path: as for :func:`covpool.data.sources.open_images`.
        split: likewise.
        layout: likewise.

    Raises:
        ValueError: in a sentence, if there are other classes, or no such split.
    """
    images = open_images(path, split, layout)
    if model.classes is None:
        if model.num_classes != len(images.classes):
            raise UsageError(
                f"the bundle tells {model.num_classes} classes apart, and {path} has {len(images.classes)}: "
                "give the images that it is for"
            )
        return images
    if new := sorted(set(images.classes) - set(model.classes)):
        raise UsageError(
            f"{path} has {counted(len(new), 'class')} that the bundle does not know, first {new[0]!r}: give "
            "the images that it is for"
        )
    return images if images.classes == model.classes else Relabelled(images, model.classes)
