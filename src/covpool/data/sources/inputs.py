"""Open images without labels, whatever they are stored in."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from covpool.data.decode import FORMAT_OF
from covpool.data.image_set import UnlabelledImages
from covpool.data.remote import Address
from covpool.data.shards.reader import open_shards
from covpool.data.shards.remote import has_index
from covpool.data.sources.files import FileImages, read_table
from covpool.data.sources.folder import is_image
from covpool.data.sources.parquet import PARQUET, ParquetImages
from covpool.data.sources.tars import IndexedTars, Tars
from covpool.errors import UsageError
from covpool.wording import counted

LOGGER = logging.getLogger("covpool")
TABLES = (".csv", ".tsv")


def open_input(data: str | Path) -> UnlabelledImages:
    """The images at an address, which is a path or anything that fsspec opens.

    Args:
        data: an image; a folder of images, with folders in it or not; a CSV with a column ``path``; a Parquet
            file, or a folder of them; a tar, or a folder of tars, with covpool's index or without.

    Raises:
        ValueError: where there are no images.
    """
    address = Address.of(data)
    images = _folder(address) if address.is_folder() else _file(address)
    if not len(images):
        raise UsageError(f"{data} has no images: their names end in {', '.join(FORMAT_OF)}")
    return images


def _file(address: Address) -> UnlabelledImages:
    extension = os.path.splitext(address.name)[1].lower()
    if extension in TABLES:
        return read_table(address)
    if extension == PARQUET:
        return ParquetImages(address.parent, [address.name])
    if extension == ".tar":
        return Tars(address.parent, [address.name])
    return FileImages(address.parent, [address.name])


def _indexed(address: Address) -> IndexedTars:
    """Tars by their index, which may not have all that is in them."""
    shards = open_shards(address.url)
    if shards.index.left_out:
        told = (
            f"{address.url}: its index.json is without {counted(shards.index.left_out, 'sample')} that "
            "have no label or no image. On a disk, and with index.json taken away, all images are read"
        )
        if not len(shards):
            raise UsageError(told)
        LOGGER.warning(told)
    return IndexedTars(shards)


def _folder(address: Address) -> UnlabelledImages:
    # On a disk the name of the index alone may be another's.
    if has_index(address.url) and (not address.is_local or any(Path(address.path).glob("*.tar"))):
        return _indexed(address)
    # One listing, for in a store it takes a request for every thousand files.
    names = address.files(lambda name: is_image(name) or name.lower().endswith((PARQUET, ".tar")))
    for extension, kind in ((".tar", Tars), (PARQUET, ParquetImages)):
        if found := [name for name in names if name.lower().endswith(extension)]:
            if len(found) < len(names):
                raise UsageError(
                    f"{address.url} has files that end in {extension}, as {found[0]}, beside other images: "
                    "name the folder of one kind"
                )
            return kind(address, found)
    return FileImages(address, names)
