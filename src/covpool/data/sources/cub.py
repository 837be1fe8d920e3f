"""CUB-200-2011 as its authors ship it: a folder of images and text files of numbered lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from covpool.data.sources.listing import Listing, Row, make_listing
from covpool.errors import UsageError

FOLDER = "CUB_200_2011"
IMAGES, LABELS, SPLIT, CLASSES = "images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt"


def recognises(path: Path) -> bool:
    """By the text files, in the folder or in the one of their authors' name in it."""
    return all((_root(path) / name).is_file() for name in (IMAGES, LABELS, SPLIT, CLASSES))


def read(path: Path) -> Listing:
    """List the images, in the order of their numbers, with the authors' split and names of classes."""
    root = _root(path)
    classes = _lines(root / CLASSES)
    return make_listing(
        root, classes.values(), _rows(root, {key: place for place, key in enumerate(classes)})
    )


def _rows(root: Path, places: dict[str, int]) -> Iterator[Row]:
    labels, is_train = _lines(root / LABELS), _lines(root / SPLIT)
    for number, name in _lines(root / IMAGES).items():
        label, told = labels.get(number), is_train.get(number)
        if label not in places:
            raise UsageError(f"{root / LABELS} has no class of {CLASSES} for image {number}, {name}")
        if told not in ("0", "1"):
            raise UsageError(f"{root / SPLIT} has neither 0 nor 1 for image {number}, {name}")
        yield Row("train" if told == "1" else "test", places[label], f"images/{name}")


def _lines(path: Path) -> dict[str, str]:
    """What each number stands for."""
    found = {}
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    for line in text.splitlines():
        number, space, value = line.strip().partition(" ")
        if not space:
            raise UsageError(f"{path} should have a number and a value on each line; one is {line!r}")
        found[number] = value.strip()
    return found


def _root(path: Path) -> Path:
    return path / FOLDER if (path / FOLDER).is_dir() else path
