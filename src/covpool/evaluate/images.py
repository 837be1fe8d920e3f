"""The images that a bundle is tried on: of classes that it knows, numbered as it numbers them."""

from __future__ import annotations

from covpool.data.counts import counted
from covpool.data.image_set import ImageSet, Relabelled
from covpool.data.sources import open_images
from covpool.models.model import PooledClassifier


def open_split(model: PooledClassifier, path: str, split: str, layout: str = "auto") -> ImageSet:
    """The images of a split, with the model's classes, once it is clear that it knows theirs.

    The split need not have images of every class, nor its classes the model's order.

    Args:
        model: of a bundle.
        path: as for :func:`covpool.data.sources.layouts.open_images`.
        split: likewise.
        layout: likewise.

    Raises:
        ValueError: in a sentence, if there are other classes, or no such split.
    """
    images = open_images(path, split, layout)
    if model.classes is None:
        if model.num_classes != len(images.classes):
            raise ValueError(
                f"the bundle tells {model.num_classes} classes apart, and {path} has {len(images.classes)}: "
                "give the images that it is for"
            )
        return images
    if new := sorted(set(images.classes) - set(model.classes)):
        raise ValueError(
            f"{path} has {counted(len(new), 'class')} that the bundle does not know, first {new[0]!r}: give "
            "the images that it is for"
        )
    return images if images.classes == model.classes else Relabelled(images, model.classes)
