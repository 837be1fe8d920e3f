"""Where images come from: a module for each source, which recognizes a path and opens the images there.

- ``folder``: ``train/wren/1.jpg``, with ``val`` and ``test`` next to ``train``; or ``wren/1.jpg``, not split.
  Without labels, also single images.
- ``csv``: a table ``path,label`` or ``path,label,split``.
- ``cub``, ``aircraft``, ``cars``: CUB-200-2011, FGVC-Aircraft and Stanford Cars as their authors ship them.
- ``shards``: tars with an index, as ``covpool shard`` writes them; without labels, any tars.
- ``parquet``: Parquet files with columns ``image`` and ``label``, as Hugging Face writes them, on disk or as
  ``hf://datasets/user/name``.

To add a source, write a module, or an object, with the names of :class:`Source` and add it to
:data:`covpool.data.SOURCES`, before the sources that would recognize its files too. A path that no
source recognizes is read as a folder or a single image.
"""

from __future__ import annotations

import glob
import itertools
import logging
import os
import pkgutil
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from covpool.data import SOURCES
from covpool.data.decode import FORMAT_OF
from covpool.data.image_set import ImageFiles, ImageSet, Joined, Names, class_counts
from covpool.data.listing import FileImages, is_image, subfolders
from covpool.errors import UnreachableError, UsageError, UsageTypeError
from covpool.hub import HUB_DATA
from covpool.storage.address import Address

LOGGER = logging.getLogger("covpool")

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")
# Other names for the splits.
SPLIT_OF: dict[str, Split] = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
}


@dataclass(frozen=True)
class Marks:
    """How a source recognizes its images on disk, by names alone.

    Attributes:
        endings: the ends of the names of its files.
        in_folders: whether it also opens a folder of such files, directly or in folders of splits. A folder
            with other folders is not meant, since these may be classes.
        files: paths in a folder, one of which is enough; with endings, only next to such a file.
    """

    endings: tuple[str, ...] = ()
    in_folders: bool = False
    files: tuple[str, ...] = ()

    def match(self, path: str) -> bool:
        """Return whether a file or folder is one for the source."""
        if not os.path.isdir(path):
            return path.lower().endswith(self.endings)
        if self.in_folders and self._fill(Path(path)):
            return True
        files = (Path(path, name) for name in self.files)
        return any(file.is_file() and (not self.endings or self._are_in(file.parent)) for file in files)

    def _fill(self, top: Path) -> bool:
        inside = subfolders(top)
        if any(name.lower() not in (*SPLIT_OF, "data") or subfolders(top / name) for name in inside):
            return False
        return any(map(self._are_in, (top, *(top / name for name in inside))))

    def _are_in(self, folder: Path) -> bool:
        return any(name.lower().endswith(self.endings) for name in os.listdir(folder))


class Source(Protocol):
    """What the module of a source defines."""

    MARKS: Marks

    def open_splits(self, path: str, cache: str | None = None) -> Mapping[Split, ImageSet]:
        """Open the labeled images of each split, which have the same classes.

        Args:
            path: the path or URL; images without a split belong to train.
            cache: a local folder for shards in object storage.
        """

    def open_unlabeled(self, path: str) -> ImageSet:
        """Open all images of all splits, each once, for use without labels."""


def open_images(path: str | Path | Any, split: str = "train", layout: str = "auto") -> ImageSet:
    """Open the labeled images of a split.

    Args:
        path: a folder, a CSV, a benchmark as its authors ship it, shards or Parquet files; see
            :mod:`covpool.data.sources`. Also ``hf://datasets/user/name`` on the Hugging Face Hub, and a
            ``Dataset`` or ``DatasetDict`` of ``datasets``.
        split: ``"train"``, ``"val"`` or ``"test"``, or several joined by ``+``, as in ``"train+val"``. Images
            without a split are in ``"train"``.
        layout: the format of the data set, such as ``"csv"``; ``"auto"`` recognizes the format and logs its
            name (``logging``, level INFO, logger ``covpool``).

    Raises:
        UsageError: if there is no such split, a class has no training image, or files are missing.
        OSError: if the path does not exist.
    """
    sets = open_splits(path, layout)
    splits = split_names(split)
    for word in splits:
        if word not in sets:
            raise UsageError(f"{path} has no split {word!r}; it has {', '.join(sets)}")
    chosen = [sets[cast(Split, word)] for word in splits]
    if len(chosen) == 1:
        return chosen[0]
    if any(images.group_sizes() is not None for images in chosen):
        raise UsageError(
            f"the splits of {path} are shards or Parquet files, which cannot be joined: write them as one"
        )
    return Joined(tuple(chosen))


def open_splits(
    path: str | Path | Any, layout: str = "auto", cache: str | Path | None = None
) -> Mapping[Split, ImageSet]:
    """Open the labeled images of every split; see :func:`open_images`.

    Args:
        path: as for :func:`open_images`.
        layout: as for :func:`open_images`.
        cache: a local folder for shards in object storage; see
            :func:`covpool.data.shards.reader.open_shards`.
    """
    if not isinstance(path, str | Path):
        return _open_object(path)
    name = layout_of(path) if layout == "auto" else layout
    LOGGER.info("%s: layout %s", path, name)
    sets = read_splits(path, name, cache)
    if not sets:
        raise UsageError(f"{path} has no images")
    _check_classes(path, sets)
    if name != "folder":  # whose images are listed by their files, so none is missing
        _check_files(path, [images for images in sets.values() if isinstance(images, ImageFiles)])
    return sets


def _open_object(data: Any) -> Mapping[Split, ImageSet]:
    from covpool.data.sources import datasets

    if not datasets.is_dataset(data):
        raise UsageTypeError(f"data must be a path, a URL, or a Dataset; got {type(data).__name__}")
    sets: Mapping[Split, ImageSet] = datasets.open_dataset(data)
    _check_classes("the data set", sets)
    return sets


def read_splits(path: str | Path, layout: str, cache: str | Path | None = None) -> Mapping[Split, ImageSet]:
    """Open the images of every split as listed, without a check for missing files and empty classes."""
    return _source(layout).open_splits(os.fspath(path), None if cache is None else os.fspath(cache))


def open_unlabeled(path: str | Path) -> ImageSet:
    """Open all images at a path or URL, for use without labels.

    Args:
        path: anything that :func:`open_images` opens; an image; a folder of images, at any depth; a CSV with
            a column ``path``; a Parquet file or a folder of them; a tar or a folder of tars.

    Raises:
        UsageError: if there are no images.
        OSError: if the path does not exist.
    """
    _check_archive(os.fspath(path))
    if os.fspath(path).startswith(HUB_DATA):
        images = _source("parquet").open_unlabeled(os.fspath(path))
    elif is_pattern(path):
        images = _matching(os.fspath(path))
    else:
        address = Address.of(path)
        images = _source(_recognized(address)).open_unlabeled(address.url)
    if not len(images):
        if is_pattern(path):
            raise UsageError(f"no image matches {path}")
        raise UsageError(f"{path} has no images: their names end in {', '.join(FORMAT_OF)}")
    return images


# Archives that are not read.
ARCHIVES = (".zip", ".rar", ".7z", ".gz", ".tgz", ".bz2", ".xz", ".zst")


def _check_archive(path: str) -> None:
    if path.lower().endswith(ARCHIVES) and not os.path.isdir(path):
        what = "download it, unpack it" if "://" in path else "unpack it"
        raise UsageError(f"{path} is an archive: {what}, and pass the folder")


def is_pattern(path: str | Path) -> bool:
    """Return whether a path is a pattern, as ``photos/*.jpg``, and not that of a file or folder."""
    return "://" not in os.fspath(path) and glob.has_magic(os.fspath(path)) and not os.path.lexists(path)


def _matching(pattern: str) -> ImageSet:
    parts = Path(pattern).parts
    fixed = list(itertools.takewhile(lambda part: not glob.has_magic(part), parts))
    folder = os.path.join("", *fixed) or "."
    names = glob.glob(os.path.join(*parts[len(fixed) :]), root_dir=folder, recursive=True)
    return FileImages(Address.of(folder).trusted(), sorted(name for name in names if is_image(name)))


def splits(path: str | Path, layout: str = "auto") -> tuple[Split, ...]:
    """Return which of train, val and test there are; images without splits are ``("train",)``."""
    return tuple(open_splits(path, layout))


def evaluation_split(path: str | Path, layout: str = "auto") -> Split:
    """Return the split to evaluate on: test, or else val, or else all images, which belong to train."""
    there = splits(path, layout)
    return next(split for split in ("test", "val", *there) if split in there)


def split_names(split: str) -> tuple[str, ...]:
    """Return the splits in an argument such as ``"train+val"``, each once.

    Example:
        >>> split_names("Training + test+train")
        ('train', 'test')
    """
    words = [word.strip() for word in split.split("+")]
    return tuple(dict.fromkeys(SPLIT_OF.get(word.lower(), word) for word in words))


def layout_of(path: str | Path) -> str:
    """Return the format of a data set, such as ``"folder"`` or ``"csv"``, recognized by the names of files.

    Raises:
        OSError: if the path does not exist.
    """
    path = os.fspath(path)
    _check_archive(path)
    if "://" in path:  # no requests for a guess: labeled images in object storage are shards or Parquet
        return "parquet" if path.lower().endswith(".parquet") or path.startswith(HUB_DATA) else "shards"
    os.stat(path)
    return _recognized(Address.of(path))


def _recognized(address: Address) -> str:
    address.is_folder()  # raises if there is nothing
    for name in SOURCES:
        marks = _source(name).MARKS
        if marks.match(address.path) if address.is_local else address.url.lower().endswith(marks.endings):
            return name
    if not address.is_local:
        from covpool.data.shards.index import has_index

        if has_index(address.url):
            return "shards"
    return "folder"


def _source(name: str) -> Source:
    if name not in SOURCES:
        raise UsageError(f"layout must be one of {', '.join(SOURCES)}; got {name!r}")
    return cast(Source, pkgutil.resolve_name(SOURCES[name]))


def _check_classes(path: str | Path, sets: Mapping[Split, ImageSet]) -> None:
    """Raise if splits have different classes, or a class has no training images."""
    train = sets.get("train")
    first = "train" if train is not None else next(iter(sets))
    for split, images in sets.items():
        if images.classes != sets[first].classes:
            raise UsageError(f"{path} has other classes in {split} than in {first}")
    if train is None or train.group_sizes() is not None:  # the labels of shards may have to be downloaded
        return
    unknown = [name for name, count in zip(train.classes, class_counts(train), strict=True) if not count]
    if unknown:
        raise UsageError(
            f"{path} has no training images of {len(unknown)} of its {len(train.classes)} classes, first of "
            f"{unknown[0]!r}: add some, or take the class out of all splits ('covpool check' lists them)"
        )


def _check_files(path: str | Path, sets: Sequence[ImageFiles]) -> None:
    missing, first = 0, ""
    for images in sets:
        for name in images.names:
            if not os.path.exists(os.path.join(images.root, name)):
                missing, first = missing + 1, first or name
    if missing:
        total = sum(map(len, sets))
        raise UsageError(f"{path} lists files that are missing: {missing:,} of {total:,}, first {first}")


class Row(NamedTuple):
    """A listed image: its split, its class by number, and its path."""

    split: Split
    label: int
    name: str


@dataclass(frozen=True, eq=False)
class Listing:
    """All images that a source lists, whether they can be read or not.

    Attributes:
        root: the folder that names start from.
        classes: the name of each class.
        names: the path of each image.
        labels: the class of each image.
        split_of: the split of each image, by its number in ``SPLITS``.
    """

    root: Path
    classes: tuple[str, ...]
    names: Names
    labels: NDArray[np.int32]
    split_of: NDArray[np.int8]

    def sets(self) -> dict[Split, ImageFiles]:
        """Return the images of each split that has any."""
        sets = {}
        for number, split in enumerate(SPLITS):
            indices = np.flatnonzero(self.split_of == number)
            if len(indices):
                sets[split] = ImageFiles(self.root, self.classes, self._names(indices), self.labels[indices])
        return sets

    def unlabeled(self) -> ImageSet:
        """Return all images, in the order of the listing."""
        return FileImages(Address.of(self.root), dict.fromkeys(self.names))

    def _names(self, indices: NDArray[np.int64]) -> Names:
        first, last = int(indices[0]), int(indices[-1])
        # Consecutive names, as folders have them, are copied at once.
        return self.names[first : last + 1] if last - first < len(indices) else self.names.take(indices)


def make_listing(root: Path, classes: Iterable[str], rows: Iterable[Row]) -> Listing:
    """Return the listing of some rows; an iterator is consumed.

    Raises:
        UsageError: if a row names a file that it may not.
    """
    labels, numbers = array("i"), array("b")
    folder = Address.of(root)

    def names() -> Iterator[str]:
        for row in rows:
            if ".." in row.name or os.path.isabs(row.name):
                _check_inside(folder, row.name)
            labels.append(row.label)
            numbers.append(SPLITS.index(row.split))
            yield row.name

    compact = Names(names())
    return Listing(
        root, tuple(classes), compact, np.array(labels, dtype=np.int32), np.array(numbers, dtype=np.int8)
    )


def _check_inside(folder: Address, name: str) -> None:
    try:
        folder.listed(name)
    except UnreachableError as error:
        raise UsageError(f"{folder.path} has a table that lists {name}: {error}") from error


def sort_classes(names: Iterable[str]) -> tuple[str, ...]:
    """Return class names sorted, by number if all of them are whole numbers.

    Example:
        >>> sort_classes(["10", "9"]), sort_classes(["10", "9", "wren"])
        (('9', '10'), ('10', '9', 'wren'))
    """
    names = list(names)
    are_whole = all(name.removeprefix("-").isdecimal() and name.isascii() for name in names)
    return tuple(sorted(names, key=int if are_whole else None))
