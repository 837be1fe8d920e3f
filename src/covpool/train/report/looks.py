"""A few images with the map of what speaks for the class they were taken for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image

from covpool.data.bad_image import BadImageError
from covpool.data.image_set import ImageSet
from covpool.explain.explaining import explained
from covpool.models.model import PooledClassifier
from covpool.train.report.record import Predictions
from covpool.train.report.thumbnails import SIDE, jpeg_uri, most_confident_errors

# Of those that are right, and of the errors.
EACH = 4


@dataclass(frozen=True)
class Look:
    """An image and its map.

    Attributes:
        name: of the image.
        label: the name of its class.
        predicted: the name of the class it was taken for.
        kind: ``exact`` or ``gradient``.
        picture: an address with what the network saw in it.
        map: likewise, under the map.
    """

    name: str
    label: str
    predicted: str
    kind: str
    picture: str
    map: str

    @property
    def is_right(self) -> bool:
        """Whether it was taken for what it is."""
        return self.label == self.predicted


def looks(predictions: Predictions, images: ImageSet, model: PooledClassifier) -> list[Look]:
    """The right ones and the errors that the model is surest of."""
    right = np.flatnonzero(predictions.right)
    surest = right[np.argsort(-predictions.confidence[right], kind="stable")[:EACH]]
    chosen = [*surest, *most_confident_errors(predictions, EACH)]
    places = {predictions.names[i]: i for i in chosen}
    found = dict(_looks(predictions, places, images, model))
    return [found[name] for name in places if name in found]


def _looks(
    predictions: Predictions, places: dict[str, int], images: ImageSet, model: PooledClassifier
) -> Iterator[tuple[str, Look]]:
    classes = predictions.classes
    for i in range(len(images)):
        name = images.name(i)
        if name not in places:
            continue
        place = places[name]
        label, predicted = int(predictions.labels[place]), int(predictions.predicted[place])
        try:
            one = explained(model, images.read(i), name, classes=[predicted])
        except (BadImageError, OSError):  # gone since; a report is about the others too
            continue
        first = one.found[0]
        pictures = _uri(one.picture), _uri(one.overlay(first.places))
        yield name, Look(name, classes[label], classes[predicted], first.kind, *pictures)


def _uri(picture: Image.Image) -> str:
    picture = picture.copy()
    picture.thumbnail((SIDE, SIDE))
    return jpeg_uri(picture)
