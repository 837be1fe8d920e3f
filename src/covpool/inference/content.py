"""Hash the images of a set, which identifies its features, and check that unreadable images stay so."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from covpool.data.decode import decode
from covpool.data.image_set import ImageSet
from covpool.errors import BadImageError, UsageError
from covpool.storage.files import Digest

Progress = Callable[[int, int], None]

# Stands for the digest of an unreadable image.
UNREADABLE = bytes(Digest().digest_size)


def content_number(data: bytes) -> int:
    """Return a number from 0 to 2**63 - 1 that identifies the bytes of an image."""
    return int.from_bytes(Digest(data).digest()[:8], "little") >> 1


class Content(NamedTuple):
    """Digests of the images of a set.

    Attributes:
        digest: the digest of all names, labels and bytes, in order.
        images: the digests of the images one after the other, zeros for unreadable images; empty for shards,
            which are not read.
    """

    digest: str
    images: bytes


def read_content(images: ImageSet, progress: Progress) -> Content:
    """Read and hash all images; shards have digests already, so they are not read."""
    if images.group_sizes() is not None:
        return Content(images.fingerprint(), b"")
    digest, each = Digest(repr(images.classes).encode("utf-8", "surrogateescape")), bytearray()
    for i in range(len(images)):
        label = images.label(i)
        digest.update(f"{images.name(i)}\0{label}\0".encode("utf-8", "surrogateescape"))
        try:
            one = Digest(images.read(i)).digest()
            digest.update(one)
        except (OSError, ValueError) as error:  # an unreadable image has no features either
            one = UNREADABLE
            digest.update(type(error).__name__.encode())
        each += one
        progress(i + 1, len(images))
    return Content(digest.hexdigest(), bytes(each))


def check_lasting(images: ImageSet, bad: Iterable[int], content: Content) -> None:
    """Raise if an unreadable image was readable when it was hashed.

    Features are identified by these hashes, so after one disk or network error the image would be missing
    from the stored features forever. Shards are not checked.

    Args:
        images: the set.
        bad: indices of the images without features.
        content: digests of the set.

    Raises:
        ValueError: if the bytes of an image have changed, or the image is readable again.
    """
    for i in bad if content.images else ():
        before = content.images[i * len(UNREADABLE) : (i + 1) * len(UNREADABLE)]
        try:
            data = images.read(i)
            if Digest(data).digest() != before:
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
        raise UsageError(
            f"{images.name(i)} became unreadable during the run ({why}). Its results were discarded. "
            "Rerun the command to resume."
        )
