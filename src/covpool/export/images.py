"""The user's own images, as the exported graph takes them and as torch's model does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from covpool.data.image_set import ImageSet
from covpool.data.loader import EvaluationLoader
from covpool.data.shards.reader import ShardSet
from covpool.data.sources import splits
from covpool.data.split import sample
from covpool.data.transforms import Preprocessing, normalize_transform, pixels_transform
from covpool.evaluate.images import open_split
from covpool.export.running import Array
from covpool.models.bundles.card import Card
from covpool.models.model import PooledClassifier

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Source:
    """Where images come from, and how they are read.

    Attributes:
        path: as for :func:`covpool.data.sources.open_images`.
        layout: likewise.
        batch_size: images at a time.
        workers: processes that read them.
    """

    path: str
    layout: str
    batch_size: int
    workers: int

    def compared_split(self) -> str:
        """What is compared on: test where there is one, else val, else train."""
        there = splits(self.path, self.layout)
        return next(split for split in ("test", "val", "train", *there) if split in there)

    def some(self, model: PooledClassifier, split: str, count: int, seed: int = 0) -> ImageSet:
        """At most so many images of a split, of all classes alike."""
        images = open_split(model, self.path, split, self.layout)
        if count >= len(images):
            return images
        return sample(images.some(count, seed) if isinstance(images, ShardSet) else images, count, seed)

    def pixels(self, images: ImageSet, preprocessing: Preprocessing, progress: Progress) -> Iterator[Tensor]:
        """Batches ``(B, 3, size, size)`` in uint8; what cannot be read is left out."""
        loader = EvaluationLoader(
            images, pixels_transform(preprocessing), batch_size=self.batch_size, workers=self.workers
        )
        done = 0
        for batch in loader:
            done += len(batch.ids) + len(batch.bad)
            if len(batch.ids):
                yield batch.images
            progress(done, len(images))


def graph_input(pixels_B3HW: Tensor, preprocessing: Preprocessing, *, takes_pixels: bool) -> Array:
    """A batch as an exported graph takes it: pixels, or normalised."""
    if takes_pixels:
        return np.ascontiguousarray(pixels_B3HW.permute(0, 2, 3, 1).numpy())
    return np.asarray(normalized(pixels_B3HW, preprocessing).numpy())


def normalized(pixels_B3HW: Tensor, preprocessing: Preprocessing) -> Tensor:
    """As training and evaluation do it, not as the graph does."""
    images: Tensor = normalize_transform(preprocessing)(pixels_B3HW)
    return images.contiguous(memory_format=torch.channels_last)


def trained_on(card: Card) -> str | None:
    """The images that a bundle was trained on, where its recipe says so."""
    data: Any = card.recipe.get("data")
    path = data.get("path") if isinstance(data, dict) else None
    return path if isinstance(path, str) else None
