"""The images that a bundle is tried on: of the classes that it knows, in its order."""

from __future__ import annotations

from covpool.data.counts import counted
from covpool.data.image_set import ImageSet
from covpool.data.sources import open_images
from covpool.models.model import PooledClassifier


def open_split(model: PooledClassifier, path: str, split: str, layout: str = "auto") -> ImageSet:
    """The images of a split, once it is clear that their classes are the model's.

    Args:
        model: of a bundle.
        path: as for :func:`covpool.data.sources.layouts.open_images`.
        split: likewise.
        layout: likewise.

    Raises:
        ValueError: in a sentence, if the classes differ, or there is no such split.
    """
    images = open_images(path, split, layout)
    if model.classes is None:
        if model.num_classes != len(images.classes):
            raise ValueError(
                f"the bundle tells {model.num_classes} classes apart, and {path} has {len(images.classes)}: "
                "give the images that it is for"
            )
    elif model.classes != images.classes:
        raise ValueError(f"{path} {_difference(model.classes, images.classes)}")
    return images


def _difference(known: tuple[str, ...], found: tuple[str, ...]) -> str:
    if new := [name for name in found if name not in known]:
        count = counted(len(new), "class")
        return f"has {count} that the bundle does not know, first {new[0]!r}: give the images that it is for"
    if gone := [name for name in known if name not in found]:
        count = counted(len(gone), "class")
        return f"lacks {count} of the bundle, first {gone[0]!r}: a folder for each must be there"
    return "has the classes of the bundle in another order"
