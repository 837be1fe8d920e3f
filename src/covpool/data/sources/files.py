"""Images without labels: one image file, or all images below a folder, on disk or in object storage."""

from __future__ import annotations

from collections.abc import Mapping

from covpool.data.image_set import ImageSet
from covpool.data.listing import FileImages, list_below
from covpool.data.sources import Marks, Split, parquet, shards
from covpool.errors import UsageError
from covpool.storage.address import Address

MARKS = Marks()  # of what no other source recognizes


def open_splits(path: str, cache: str | None = None) -> Mapping[Split, ImageSet]:
    """Raise: a single image has no label."""
    raise UsageError(
        f"{path} is neither a folder nor a CSV: give a folder of classes, or a CSV of path,label"
    )


def open_unlabeled(path: str) -> ImageSet:
    """Open one image."""
    address = Address.of(path)
    return FileImages(address.parent.trusted(), [address.name])


def open_folder(path: str) -> ImageSet:
    """Open all images below a folder, or the tars or Parquet files below it."""
    address = Address.of(path)
    names = list_below(address)  # once: object storage needs a request for every thousand files
    if any(name.lower().endswith(shards.EXTENSION) for name in names):
        return shards.open_files(address, names)
    if any(name.lower().endswith(parquet.EXTENSION) for name in names):
        return parquet.open_files(address, names)
    return FileImages(address.trusted(), names)
