"""A few images to look at: of a file, of a folder without classes, or spread over a collection."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from covpool.data.image_set import ImageSet
from covpool.data.sources import open_splits
from covpool.data.sources.folder import folders_with_images, is_image


class SomeImage(NamedTuple):
    """Its name, its class where that is known, and the bytes of its file."""

    name: str
    label: str | None
    content: bytes


def some_images(data: str | Path, limit: int) -> Iterator[SomeImage]:
    """At most so many.

    Args:
        data: an image, a folder of images, or a collection as for ``covpool train``, whose last split is
            taken: test where there is one.
        limit: of images.
    """
    path = Path(data)
    if path.is_file() and is_image(path.name):
        yield SomeImage(path.name, None, path.read_bytes())
        return
    loose = sorted(one for one in path.iterdir() if is_image(one.name)) if path.is_dir() else []
    # Beside folders of classes they are no part of the collection.
    if loose and not any(True for _ in folders_with_images(path)):
        yield from (SomeImage(one.name, None, one.read_bytes()) for one in loose[:limit])
        return
    images: ImageSet = list(open_splits(data).values())[-1]
    # Spread over the set: a folder by class would show its first class alone.
    shown = min(limit, len(images))
    for i in (k * len(images) // shown for k in range(shown)):
        yield SomeImage(images.name(i), images.classes[int(images.labels[i])], images.read(i))
