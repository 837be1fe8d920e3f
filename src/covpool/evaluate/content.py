"""What tells a set of images from another by their bytes, so that features are not taken for others'."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from covpool.data.image_set import ImageSet
from covpool.data.shards.reader import ShardSet
from covpool.train.splits import fingerprint

Progress = Callable[[int, int], None]


def content_digest(images: ImageSet, progress: Progress) -> str:
    """Of all names, labels and bytes, in order. Shards have digests of their own, so they are not read."""
    if isinstance(images, ShardSet):
        return fingerprint(images)
    digest = hashlib.sha256(repr(images.classes).encode("utf-8", "surrogateescape"))
    for i in range(len(images)):
        label = int(images.labels[i])
        digest.update(f"{images.name(i)}\0{label}\0".encode("utf-8", "surrogateescape"))
        digest.update(_bytes_digest(images, i))
        progress(i + 1, len(images))
    return digest.hexdigest()


def _bytes_digest(images: ImageSet, i: int) -> bytes:
    try:
        return hashlib.sha256(images.read(i)).digest()
    except (OSError, ValueError) as error:  # such an image has no features either
        return type(error).__name__.encode()
