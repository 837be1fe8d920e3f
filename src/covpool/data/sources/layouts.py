"""From a path to sets of images, whatever the layout.

To add a layout: write a file with ``recognises`` and ``read``, as :class:`LayoutFile` says, and add it to
``LAYOUTS``, before those that would recognise it too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

from covpool.data.image_set import ImageFiles, ImageSet, Joined, class_counts
from covpool.data.sources import aircraft, cars, csv, cub, folder, shards
from covpool.data.sources.listing import Listing, Split, split_names
from covpool.errors import UsageError

LOGGER = logging.getLogger("covpool")


class LayoutFile(Protocol):
    """What the file of a layout has."""

    def recognises(self, path: Path) -> bool:
        """Whether this is such a layout, by names of files alone."""

    def read(self, path: Path) -> Listing:
        """All its images."""


LAYOUTS = {
    "csv": cast(LayoutFile, csv),
    "cub": cast(LayoutFile, cub),
    "aircraft": cast(LayoutFile, aircraft),
    "cars": cast(LayoutFile, cars),
    "folder": cast(LayoutFile, folder),
}
# Their images are not files, so they are no listing.
SHARDS = "shards"
# Which listings come from the files themselves, so that none can be missing.
LISTED_BY_FILES = ("folder",)


def open_images(path: str | Path, split: str = "train", layout: str = "auto") -> ImageSet:
    """The images of a split.

    Args:
        path: a folder, a CSV, a benchmark as its authors ship it, or shards; see :mod:`covpool.data.sources`.
        split: ``"train"``, ``"val"`` or ``"test"``, or several joined by ``+``, as in ``"train+val"``. What
            has no splits is ``"train"``.
        layout: ``"csv"``, ``"cub"``, ``"aircraft"``, ``"cars"``, ``"folder"`` or ``"shards"``; ``"auto"``
            finds it out, and logs which it is (``logging``, level INFO, logger ``covpool``).

    Raises:
        ValueError: in a sentence, if there is no such split, a class has no image to be learned from, or
            files are missing.
        OSError: if there is no such path.
    """
    sets = open_splits(path, layout)
    wanted = split_names(split)
    for word in wanted:
        if word not in sets:
            raise UsageError(f"{path} has no split {word!r}; it has {', '.join(sets)}")
    chosen = [sets[cast(Split, word)] for word in wanted]
    if len(chosen) == 1:
        return chosen[0]
    if not all(isinstance(images, ImageFiles) for images in chosen):
        raise UsageError(f"the splits of {path} are shards, which cannot be joined: write them as one")
    return Joined(tuple(chosen))


def open_splits(
    path: str | Path, layout: str = "auto", cache: str | Path | None = None
) -> Mapping[Split, ImageSet]:
    """The images of every split that there is; as :func:`open_images`, at the cost of one.

    Args:
        path: as there.
        layout: as there.
        cache: a local folder for the shards of a store; see :func:`covpool.data.shards.reader.open_shards`.
    """
    name = layout_of(path) if layout == "auto" else layout
    LOGGER.info("%s: layout %s", path, name)
    sets = read_splits(path, name, cache)
    if not sets:
        raise UsageError(f"{path} has no images")
    _check_classes(path, sets)
    if name in LAYOUTS and name not in LISTED_BY_FILES:
        _check_files(path, [images for images in sets.values() if isinstance(images, ImageFiles)])
    return sets


def read_splits(path: str | Path, layout: str, cache: str | Path | None = None) -> Mapping[Split, ImageSet]:
    """The images of every split as they are listed, missing files, empty classes and all."""
    if layout == SHARDS:
        return shards.read(path, cache)
    if layout not in LAYOUTS:
        raise UsageError(f"layout must be one of {', '.join([*LAYOUTS, SHARDS])}; got {layout!r}")
    return LAYOUTS[layout].read(Path(path)).sets()


def splits(path: str | Path, layout: str = "auto") -> tuple[Split, ...]:
    """Which of train, val and test there are; what has none is ``("train",)``."""
    return tuple(open_splits(path, layout))


def layout_of(path: str | Path) -> str:
    """The layout of a path, by the names of files in it.

    Raises:
        OSError: if there is no such path.
        ValueError: if it is no layout.
    """
    if shards.recognises(path):
        return SHARDS
    os.stat(path)
    for name, file in LAYOUTS.items():
        if file.recognises(Path(path)):
            return name
    raise UsageError(
        f"{path} is neither a folder nor a CSV: give a folder of classes, or a CSV of path,label"
    )


def _check_classes(path: str | Path, sets: Mapping[Split, ImageSet]) -> None:
    """Labels mean the same in all splits, and nothing can be said of a class without training images."""
    train = sets.get("train")
    first = "train" if train is not None else next(iter(sets))
    for split, images in sets.items():
        if images.classes != sets[first].classes:
            raise UsageError(f"{path} has other classes in {split} than in {first}")
    if not isinstance(train, ImageFiles):  # of shards, the labels are not all known without reading them all
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
