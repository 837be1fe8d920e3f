"""Parts of report pages: templates, formatted numbers, and thumbnails of images."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image

from covpool.data.decode import decode
from covpool.data.image_set import ImageSet
from covpool.errors import BadImageError
from covpool.models.model import PooledClassifier
from covpool.terminal import duration as time_for_people
from covpool.training.report.record import Predictions

MISSING = "–"


def render(template: str, **values: Any) -> bytes:
    """Render a page with every value escaped; bytes that are not text become question marks."""
    return _environment().get_template(template).render(**values).encode("utf-8", errors="replace")


def percent(share: float | None) -> str:
    r"""Format a share as a percentage.

    Example:
        >>> percent(0.8731), percent(None)
        ('87.3\xa0%', '–')
    """
    return MISSING if not _is_known(share) else f"{100 * share:.1f}\u00a0%"


def points(difference: float | None) -> str:
    """Format a difference of two shares in percentage points, with its sign.

    Example:
        >>> points(0.0234), points(-0.0004), points(-0.05)
        ('+2.3', '0.0', '−5.0')
    """
    if not _is_known(difference):
        return MISSING
    text = f"{100 * difference:+.1f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")


def number(value: float | None, decimals: int = 0) -> str:
    """Format a number with separators between thousands."""
    return MISSING if not _is_known(value) else f"{value:,.{decimals}f}"


def duration(seconds: float | None) -> str:
    """Format a time in hours and minutes, or in minutes and seconds."""
    return MISSING if not _is_known(seconds) else time_for_people(seconds)


def breakable(name: str) -> Markup:
    """Escape a name, and allow a line break after ``_``, ``/`` and ``-``.

    Example:
        >>> breakable("114.House_<b>")
        Markup('114.House_<wbr>&lt;b&gt;')
    """
    return Markup("<wbr>").join(re.split(r"(?<=[_/-])", name))


def _is_known(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("covpool.training.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {f.__name__: f for f in (percent, points, number, duration, breakable)}
    return environment


# Pixels of the longer side.
SIDE = 224
# Maps of correct images, and of errors.
EACH = 4


class Tile(NamedTuple):
    """An image with the names of its class and of the predicted one; ``picture`` is missing if unreadable."""

    name: str
    label: str
    predicted: str
    confidence: float
    picture: Image.Image | None

    @property
    def uri(self) -> str:
        """The picture as a data URI; empty if there is none."""
        return "" if self.picture is None else jpeg_uri(self.picture)


class Look(NamedTuple):
    """An image and its map, both as data URIs; the kind of map is ``exact`` or ``gradient``."""

    name: str
    label: str
    predicted: str
    confidence: float
    kind: str
    picture: str
    map: str

    @property
    def is_right(self) -> bool:
        """Whether the prediction is correct."""
        return self.label == self.predicted


def most_confident_errors(predictions: Predictions, most: int) -> NDArray[np.int64]:
    """Return the numbers of the most confident errors."""
    return _most_confident(predictions, ~predictions.right, most)


def tiles(predictions: Predictions, numbers: Iterable[int], images: ImageSet | None) -> list[Tile]:
    """Return some of the predictions with their images."""
    numbers = [int(number) for number in numbers]
    names = {predictions.names[i] for i in numbers}
    pictures = {} if images is None else {name: thumbnail(images, i) for name, i in _named(images, names)}
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


def looks(predictions: Predictions, images: ImageSet, model: PooledClassifier) -> list[Look]:
    """Return maps for the most confident correct predictions and errors."""
    from covpool.explain.explaining import explained

    chosen = [
        *_most_confident(predictions, predictions.right, EACH),
        *most_confident_errors(predictions, EACH),
    ]
    rows = {predictions.names[i]: i for i in chosen}
    numbers = dict(_named(images, set(rows)))
    shown = []
    for name, place in rows.items():
        label, predicted = int(predictions.labels[place]), int(predictions.predicted[place])
        try:
            explanation = explained(model, images.read(numbers[name]), name, classes=[predicted])
        except (BadImageError, OSError, KeyError):  # the image is gone
            continue
        map_ = explanation.evidence[0]
        uris = [
            jpeg_uri(_small(picture))
            for picture in (explanation.picture, explanation.overlay(map_.positions))
        ]
        classes = predictions.classes
        sure = float(predictions.confidence[place])
        shown.append(Look(name, classes[label], classes[predicted], sure, map_.kind, *uris))
    return shown


def thumbnail(images: ImageSet, i: int) -> Image.Image | None:
    """Return an image of a set, small; ``None`` if it is unreadable or gone."""
    try:
        return _small(decode(images.read(i)))
    except (BadImageError, OSError):
        return None


def squared(picture: Image.Image, colour: str) -> Image.Image:
    """Center a picture in a square."""
    side = max(picture.size)
    square = Image.new("RGB", (side, side), colour)
    square.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
    return square


def jpeg_uri(picture: Image.Image) -> str:
    """Return a picture as a data URI."""
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=82)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"


def _small(picture: Image.Image) -> Image.Image:
    picture = picture.copy()
    picture.thumbnail((SIDE, SIDE))
    return picture


def _most_confident(predictions: Predictions, which: NDArray[np.bool_], most: int) -> NDArray[np.int64]:
    chosen = np.flatnonzero(which)
    return chosen[np.argsort(-predictions.confidence[chosen], kind="stable")[:most]]


def _named(images: ImageSet, names: set[str]) -> Iterator[tuple[str, int]]:
    """Return names and numbers of the wanted images: a set finds images by number only."""
    return ((name, i) for i in range(len(images)) if (name := images.name(i)) in names)
