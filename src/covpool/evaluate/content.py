"""What tells a set of images from another by their bytes, so that features are not taken for others'."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

from covpool.data.decode import BadImageError, decode
from covpool.data.image_set import ImageSet
from covpool.data.shards.reader import ShardSet
from covpool.train.splits import fingerprint

Progress = Callable[[int, int], None]

# In the place of a digest.
UNREADABLE = bytes(hashlib.sha256().digest_size)


class Content(NamedTuple):
    """What was found when all images were read.

    Attributes:
        digest: of all names, labels and bytes, in order.
        images: the digests of each image's bytes, one after the other, zeros where they could not be read;
            nothing of shards, which are not read for it.
    """

    digest: str
    images: bytes


def read_content(images: ImageSet, progress: Progress) -> Content:
    """Read all images. Shards have digests of their own, so they are not read."""
    if isinstance(images, ShardSet):
        return Content(fingerprint(images), b"")
    digest, each = hashlib.sha256(repr(images.classes).encode("utf-8", "surrogateescape")), bytearray()
    for i in range(len(images)):
        label = int(images.labels[i])
        digest.update(f"{images.name(i)}\0{label}\0".encode("utf-8", "surrogateescape"))
        try:
            one = hashlib.sha256(images.read(i)).digest()
            digest.update(one)
        except (OSError, ValueError) as error:  # such an image has no features either
            one = UNREADABLE
            digest.update(type(error).__name__.encode())
        each += one
        progress(i + 1, len(images))
    return Content(digest.hexdigest(), bytes(each))


def check_lasting(images: ImageSet, bad: Iterable[int], content: Content) -> None:
    """Raise unless images that were found bad are so by the bytes that were read before.

    What is kept is known by these bytes, so an image that a disk or a network failed to give once would be
    missing from it ever after. Of shards nothing is known, and nothing is said.

    Args:
        images: the set.
        bad: numbers of images that have no features.
        content: of the set.

    Raises:
        ValueError: for one that is no bad image.
    """
    for i in bad if content.images else ():
        before = content.images[i * len(UNREADABLE) : (i + 1) * len(UNREADABLE)]
        try:
            data = images.read(i)
            if hashlib.sha256(data).digest() != before:
                why = "it has changed"
            else:
                decode(data)
                why = "it can be again"
        except BadImageError:
            continue
        except OSError as error:
            if before == UNREADABLE:
                continue
            why = error.strerror or str(error)
        raise ValueError(
            f"{images.name(i)} was there a while ago, and then could not be read ({why}): nothing of it is "
            "kept, and the same command goes on"
        )
