"""A folder for each class: in one folder, or in one for each of train, val and test.

The order of classes and images is that of their names by code point, as in torchvision's ``ImageFolder``, on
every file system and in every language. Folders in the folder of a class belong to the class. Links are
followed, to files and folders. Hidden files and folders, whose names begin with a dot, are passed over, and
so are files whose extension is none of an image.
"""

from __future__ import annotations

import logging
import os
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

from covpool.data.decode import FORMAT_OF
from covpool.data.sources.listing import SPLIT_OF, Listing, Row, Split, make_listing
from covpool.errors import UsageError

LOGGER = logging.getLogger("covpool")
Identity = tuple[int, int]
# What macOS puts into zip files, beside the images.
NOT_OURS = "__MACOSX"


def recognises(path: Path) -> bool:
    """Any folder."""
    return path.is_dir()


def read(path: Path) -> Listing:
    """List the images, from the names in the folders alone: no file is opened, nor asked for its size.

    Raises:
        ValueError: if there are no folders of classes.
    """
    splits = split_folders(path)
    for name in folders_with_images(path) if splits else ():
        if name not in splits.values():
            LOGGER.warning("%s is left out: it is beside folders of splits, and is none", path / name)
    roots = splits or {"train": ""}
    folders = {split: _class_folders(path / root) for split, root in roots.items()}
    classes = sorted({name for found in folders.values() for name in found})
    if not classes:
        raise UsageError(_no_classes(path))
    return make_listing(path, classes, _rows(path, roots, folders, classes))


def split_folders(path: Path) -> dict[Split, str]:
    """The folders of train, val and test, where there are any.

    Where none of them holds folders of classes, and there are others, they are classes: a train may be one.
    """
    names = subfolders(path)
    found: dict[Split, str] = {}
    for name in names:
        split = SPLIT_OF.get(name.lower())
        if split in found:
            raise UsageError(f"{path} has two folders for {split}, {found[split]} and {name}: keep one")
        if split is not None:
            found[split] = name
    has_classes = any(subfolders(path / name) for name in found.values())
    if found and not has_classes and len(found) == len(names):
        raise UsageError(_no_classes(path / next(iter(found.values()))))
    return found if has_classes else {}


def folders_with_images(path: Path) -> Iterator[str]:
    """The names of the visible folders in a folder that hold images, or whose folders do."""
    for name in subfolders(path):
        if any(True for _ in files_under(path, is_image, name)):
            yield name


def subfolders(path: Path) -> list[str]:
    """The names of the visible folders in a folder."""
    with os.scandir(path) as entries:
        return sorted(entry.name for entry in entries if is_visible(entry.name) and _is_folder(entry))


def is_visible(name: str) -> bool:
    """Whether it is neither hidden nor put there by a system."""
    return not name.startswith(".") and name != NOT_OURS


def is_image(name: str) -> bool:
    """Whether a file is called as images are."""
    return os.path.splitext(name)[1].lower() in FORMAT_OF


def _class_folders(path: Path) -> dict[str, str]:
    """The folders of classes by the names of the classes."""
    found: dict[str, str] = {}
    for name in subfolders(path):
        if found.setdefault(_composed(name), name) != name:
            raise UsageError(
                f"{path} has two folders {_composed(name)!r} that are spelled by other bytes: join them"
            )
    return found


def _rows(
    path: Path, roots: dict[Split, str], folders: dict[Split, dict[str, str]], classes: list[str]
) -> Iterator[Row]:
    for split, root in roots.items():
        for label, name in enumerate(classes):
            if name in folders[split]:
                start = "/".join(filter(None, (root, folders[split][name])))
                for image in files_under(path, is_image, start):
                    yield Row(split, label, image)


def files_under(
    root: Path, wanted: Callable[[str], bool], folder: str = "", above: tuple[Identity, ...] = ()
) -> Iterator[str]:
    """The files in a folder and below, in order, as paths from ``root``.

    Args:
        root: where paths start.
        wanted: whether a file is one of them, by its name.
        folder: of which the files are, as a path from ``root``.
        above: the folders on the way to it.
    """
    path = os.path.join(root, folder)
    status = os.stat(path)
    identity = status.st_dev, status.st_ino
    if identity in above:
        raise UsageError(f"{path} is a link back to a folder above it: remove it")
    files, folders = [], []
    with os.scandir(path) as entries:
        for entry in entries:
            if not is_visible(entry.name):
                continue
            # The kind comes with the name; only links are looked at. One to nowhere is left to complain of.
            if _is_folder(entry):
                folders.append(entry.name)
            elif wanted(entry.name) and (entry.is_symlink() or entry.is_file()):
                files.append(entry.name)
    start = f"{folder}/" if folder else ""
    for name in sorted(files, key=_composed):
        yield f"{start}{name}"
    for name in sorted(folders, key=_composed):
        yield from files_under(root, wanted, f"{start}{name}", (*above, identity))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _composed(name: str) -> str:
    """With é as one letter, not as e and an accent, as which macOS may store it."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def _no_classes(path: Path) -> str:
    return (
        f"{path} has no folders of classes: put the images of each class into a folder of its name, or list "
        "them in a CSV of path,label"
    )
