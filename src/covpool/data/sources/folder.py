"""A folder per class, in one folder or in one per split. Without labels: one image, or any folder of images.

Classes and images are sorted by code point, as in torchvision's ``ImageFolder``, on every file system and in
every language. Folders in the folder of a class belong to the class. Links to files and folders are followed.
Hidden files and folders, whose names begin with a dot, are ignored. Files without an image extension are too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from covpool.data.decode import BEGINNING, EXTENSIONS, format_of
from covpool.data.image_set import ImageFiles, ImageSet
from covpool.data.listing import (
    FileImages,
    ImageNames,
    composed,
    files_under,
    is_image,
    list_below,
    subfolders,
)
from covpool.data.sources import SPLIT_OF, Listing, Marks, Row, Split, make_listing, parquet, shards
from covpool.errors import UsageError
from covpool.storage.address import Address
from covpool.storage.files import open_regular

LOGGER = logging.getLogger("covpool")
MARKS = Marks()  # of what no other source recognizes


def open_splits(path: str, cache: str | None = None) -> Mapping[Split, ImageFiles]:
    """List the images by the names in the folders; no file is opened or queried for its size.

    Raises:
        UsageError: if there are no folders of classes.
    """
    if Path(path).is_file():
        raise UsageError(
            f"{path} is neither a folder nor a CSV: give a folder of classes, or a CSV of path,label"
        )
    return _read(Path(path)).sets()


def open_unlabeled(path: str) -> ImageSet:
    """Open one image, or all images below a folder, or the tars or Parquet files below it."""
    address = Address.of(path)
    if not address.is_folder():
        if address.is_local:
            _check_image(path)
        return FileImages(address.parent.trusted(), [address.name])
    names = list_below(address)  # once: object storage needs a request for every thousand files
    if any(name.lower().endswith(shards.EXTENSION) for name in names):
        return shards.open_files(address, names)
    if any(name.lower().endswith(parquet.EXTENSION) for name in names):
        return parquet.open_files(address, names)
    return FileImages(address.trusted(), names)


def _check_image(path: str) -> None:
    """Raise if a file is not like an image, by its name and its first bytes."""
    if not is_image(path):
        with open_regular(path) as file:
            beginning = file.read(BEGINNING)
        if beginning and format_of(beginning) not in EXTENSIONS:
            raise UsageError(
                f"{path} is not an image: pass an image, a folder of images, or a CSV whose first line is "
                "path"
            )


def _read(path: Path) -> Listing:
    splits = split_folders(path)
    for name in folders_with_images(path) if splits else ():
        if name not in splits.values():
            LOGGER.warning("%s is left out: it is next to folders of splits, but is not a split", path / name)
    roots = splits or {"train": ""}
    folders = {split: _class_folders(path / root) for split, root in roots.items()}
    classes = sorted({name for names in folders.values() for name in names})
    if not classes:
        raise UsageError(_no_classes(path))
    is_image = ImageNames()
    listing = make_listing(path, classes, _rows(path, roots, folders, classes, is_image))
    is_image.warn(path)
    return listing


def split_folders(path: Path) -> dict[Split, str]:
    """Return the folders of train, val and test.

    If none of them holds folders of classes, and there are other folders, all of them are classes.
    """
    names = subfolders(path)
    folders: dict[Split, str] = {}
    for name in names:
        split = SPLIT_OF.get(name.lower())
        if split in folders:
            raise UsageError(f"{path} has two folders for {split}, {folders[split]} and {name}: keep one")
        if split is not None:
            folders[split] = name
    has_classes = any(subfolders(path / name) for name in folders.values())
    if folders and not has_classes and len(folders) == len(names):
        raise UsageError(_no_classes(path / next(iter(folders.values()))))
    return folders if has_classes else {}


def folders_with_images(path: Path) -> Iterator[str]:
    """Yield the visible folders in a folder that have images in them or below."""
    for name in subfolders(path):
        if any(True for _ in files_under(path, is_image, name)):
            yield name


def _class_folders(path: Path) -> dict[str, str]:
    """Return the folder of each class."""
    folders: dict[str, str] = {}
    for name in subfolders(path):
        if folders.setdefault(composed(name), name) != name:
            raise UsageError(
                f"{path} has two folders {composed(name)!r} with different Unicode bytes: merge them"
            )
    return folders


def _rows(
    path: Path,
    roots: dict[Split, str],
    folders: dict[Split, dict[str, str]],
    classes: list[str],
    is_image: ImageNames,
) -> Iterator[Row]:
    for split, root in roots.items():
        for label, name in enumerate(classes):
            if name in folders[split]:
                start = "/".join(filter(None, (root, folders[split][name])))
                for image in files_under(path, is_image, start):
                    yield Row(split, label, image)


def _no_classes(path: Path) -> str:
    return (
        f"{path} has no folders of classes: put the images of each class into a folder with its name, or "
        "list them in a CSV of path,label"
    )
