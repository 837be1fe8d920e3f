"""What tells a set of images from another by their bytes, so that features are not taken for others'."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

from covpool.data.decode import decode
from covpool.data.image_set import ImageSet
from covpool.data.shards.reader import ShardSet
from covpool.train.splits import fingerprint

Progress = Callable[[int, int], None]


class Content(NamedTuple):
    """What was found when all images were read.

    Attributes:
        digest: of all names, labels and bytes, in order.
        unreadable: the numbers of the images whose files could not be read.
    """

    digest: str
    unreadable: frozenset[int]


def read_content(images: ImageSet, progress: Progress) -> Content:
    """Read all images. Shards have digests of their own, so they are not read."""
    if isinstance(images, ShardSet):
        return Content(fingerprint(images), frozenset())
    unreadable = []
    digest = hashlib.sha256(repr(images.classes).encode("utf-8", "surrogateescape"))
    for i in range(len(images)):
        label = int(images.labels[i])
        digest.update(f"{images.name(i)}\0{label}\0".encode("utf-8", "surrogateescape"))
        try:
            digest.update(hashlib.sha256(images.read(i)).digest())
        except (OSError, ValueError) as error:  # such an image has no features either
            digest.update(type(error).__name__.encode())
            unreadable.append(i)
        progress(i + 1, len(images))
    return Content(digest.hexdigest(), frozenset(unreadable))


def check_lasting(images: ImageSet, bad: Iterable[int], content: Content) -> None:
    """Raise unless images that were found bad are so for good.

    What is kept is known by the images' bytes, so an image that a disk or a network failed to give once
    would be missing from it ever after.

    Args:
        images: the set.
        bad: numbers of images that have no features.
        content: of the set.

    Raises:
        ValueError: for one that could be read before.
    """
    for i in bad:
        if i in content.unreadable:
            continue
        try:
            decode(images.read(i))
            why = "it can be again"
        except OSError as error:
            why = error.strerror or str(error)
        except ValueError:  # it is no image
            continue
        raise ValueError(
            f"{images.name(i)} was there a while ago, and then could not be read ({why}): nothing of it is "
            "kept, and the same command goes on from there"
        )
