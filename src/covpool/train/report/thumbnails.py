"""A few images of a set, small, by their names."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from covpool.data.decode import decode
from covpool.data.image_set import ImageSet
from covpool.errors import BadImageError
from covpool.train.report.record import Predictions

SIDE = 224


@dataclass(frozen=True)
class Tile:
    """An image and what was made of it.

    Attributes:
        name: of the image.
        label: the name of its class.
        predicted: the name of the class it was taken for.
        confidence: the probability of that.
        picture: small; ``None`` if it could not be had.
    """

    name: str
    label: str
    predicted: str
    confidence: float
    picture: Image.Image | None

    @property
    def uri(self) -> str:
        """The picture within an address; empty if there is none."""
        if self.picture is None:
            return ""
        return jpeg_uri(self.picture)


def jpeg_uri(picture: Image.Image) -> str:
    """An address that has the picture in it."""
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=82)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"


def most_confident_errors(predictions: Predictions, most: int) -> NDArray[np.int64]:
    """The numbers of the errors that the model was surest of, surest first."""
    wrong = np.flatnonzero(~predictions.right)
    order = np.argsort(-predictions.confidence[wrong], kind="stable")
    return wrong[order[:most]]


def tiles(predictions: Predictions, numbers: Iterable[int], images: ImageSet | None) -> list[Tile]:
    """Some of the predictions with their images."""
    numbers = [int(number) for number in numbers]
    pictures = {} if images is None else dict(_pictures(images, {predictions.names[i] for i in numbers}))
    return [
        Tile(
            predictions.names[i],
            predictions.classes[predictions.labels[i]],
            predictions.classes[predictions.predicted[i]],
            float(predictions.confidence[i]),
            pictures.get(predictions.names[i]),
        )
        for i in numbers
    ]


def thumbnail(images: ImageSet, i: int) -> Image.Image | None:
    """An image of a set, small; ``None`` if it is bad, or gone since: a report is about the others too."""
    try:
        picture = decode(images.read(i))
    except (BadImageError, OSError):
        return None
    picture.thumbnail((SIDE, SIDE))
    return picture


def squared(picture: Image.Image, colour: str) -> Image.Image:
    """The whole picture in the middle of a square, so that all are alike."""
    side = max(picture.size)
    square = Image.new("RGB", (side, side), colour)
    square.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
    return square


def _pictures(images: ImageSet, wanted: set[str]) -> Iterator[tuple[str, Image.Image]]:
    """Look for names from image to image, since a set is asked by number; those not found are left out."""
    for i in range(len(images)):
        if not wanted:
            return
        name = images.name(i)
        if name not in wanted:
            continue
        wanted.remove(name)
        picture = thumbnail(images, i)
        if picture is not None:
            yield name, picture
