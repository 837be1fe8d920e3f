"""A batch of images, made by a worker process, with what had to be replaced in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from covpool.data.decode import decode
from covpool.data.image_set import ImageSet
from covpool.data.order import number, torch_seeded
from covpool.errors import BadImageError, DataError, ShardError

Transform = Callable[[Image.Image], Tensor]

# Others that are tried in place of a bad image, the first half of them near it.
ATTEMPTS = 16


class BadImage(NamedTuple):
    """An image that could not be used.

    Attributes:
        name: of the image.
        reason: in a word or two; see :class:`covpool.data.decode.BadImageError`.
        sentence: what exactly.
    """

    name: str
    reason: str
    sentence: str


class Batch(NamedTuple):
    """What a loader yields.

    Attributes:
        images: ``(B, 3, height, width)``.
        labels: ``(B,)``.
        ids: ``(B,)``, the samples that the order asked for. Where one was bad, image and label are another's.
        bad: the images that could not be used.
    """

    images: Tensor
    labels: Tensor
    ids: Tensor
    bad: Sequence[BadImage]


class Draw(NamedTuple):
    """A sample to load, and what its random numbers depend on.

    Attributes:
        epoch: in which it comes.
        id: the sample.
        occurrence: tells apart the times that a sample comes in one epoch.
    """

    epoch: int
    id: int
    occurrence: int = 0


class Failure(NamedTuple):
    """A :class:`DataError` on its way from a worker process, which would wrap an exception in a traceback."""

    sentence: str


class BatchDataset(Dataset[Batch | Failure]):
    """Makes whole batches: an index is the list of the draws in it.

    Args:
        images: the set.
        transform: from a picture to a tensor; its random numbers are torch's.
        seed: of its random numbers and of replacements.
        replace: put another image in the place of a bad one, in training; otherwise the batch lacks it.
    """

    def __init__(self, images: ImageSet, transform: Transform, seed: int, *, replace: bool) -> None:
        self.images, self.transform, self.seed, self.replace = images, transform, seed, replace

    def __getitem__(self, draws: Sequence[Draw]) -> Batch | Failure:
        bad: dict[int, BadImage] = {}
        try:
            loaded = [(draw.id, found) for draw in draws if (found := self._load(draw, bad)) is not None]
        except (DataError, ShardError) as error:
            return Failure(str(error))
        images = [image for _, (image, _) in loaded]
        return Batch(
            images=torch.stack(images) if images else self._no_images(),
            labels=torch.tensor([label for _, (_, label) in loaded], dtype=torch.int64),
            ids=torch.tensor([i for i, _ in loaded], dtype=torch.int64),
            bad=tuple(bad.values()),
        )

    def _load(self, draw: Draw, bad: dict[int, BadImage]) -> tuple[Tensor, int] | None:
        """The tensor and label of a sample, or of the one in its place."""
        for attempt in range(ATTEMPTS + 1):
            i = draw.id if attempt == 0 else self._substitute(draw, attempt)
            picture = self._picture(i, bad)
            if picture is not None:
                with torch_seeded("augmentation", self.seed, *draw):
                    return self.transform(picture), self.images.label(i)
            if not self.replace:
                return None
        raise DataError(
            f"{self.images.name(draw.id)} cannot be used, nor can any of {ATTEMPTS} others drawn in its "
            "place: 'covpool check' lists what is wrong with which images"
        )

    def _picture(self, i: int, bad: dict[int, BadImage]) -> Image.Image | None:
        if i in bad:
            return None
        try:
            return decode(self.images.read(i))
        except BadImageError as error:
            bad[i] = BadImage(self.images.name(i), error.reason, str(error))
        except OSError as error:
            bad[i] = BadImage(self.images.name(i), "unreadable", error.strerror or str(error))
        return None

    def _substitute(self, draw: Draw, attempt: int) -> int:
        """Return another sample, chosen by the seed; the first attempts stay in the same group."""
        among = self.images.near(draw.id) if attempt <= ATTEMPTS // 2 else range(len(self.images))
        return among[number("replacement", self.seed, draw.epoch, draw.id, attempt) % len(among)]

    def _no_images(self) -> Tensor:
        """None at all, of the shape that images have."""
        return self.transform(Image.new("RGB", (64, 64)))[None][:0]
