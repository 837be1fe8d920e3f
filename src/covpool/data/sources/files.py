"""A single image, without a label."""

from __future__ import annotations

from collections.abc import Mapping

from covpool.data.address import Address
from covpool.data.image_set import ImageSet
from covpool.data.remote import FileImages
from covpool.data.sources import Marks, Split
from covpool.errors import UsageError

MARKS = Marks()  # of what no other source recognizes


def open_splits(path: str, cache: str | None = None) -> Mapping[Split, ImageSet]:
    """Raise: a single image has no label."""
    raise UsageError(
        f"{path} is neither a folder nor a CSV: give a folder of classes, or a CSV of path,label"
    )


def open_unlabeled(path: str) -> ImageSet:
    """Open one image."""
    address = Address.of(path)
    return FileImages(address.parent, [address.name])
