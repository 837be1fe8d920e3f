"""CUB-200-2011 as its authors ship it: a folder of images and text files of numbered lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from covpool.data.image_set import ImageFiles, ImageSet
from covpool.data.sources import Listing, Marks, Row, Split, make_listing
from covpool.errors import UsageError
from covpool.storage.files import read_text

FOLDER = "CUB_200_2011"
IMAGES, LABELS, SPLIT, CLASSES = "images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt"
MARKS = Marks(files=(LABELS, f"{FOLDER}/{LABELS}"))


def open_splits(path: str, cache: str | None = None) -> Mapping[Split, ImageFiles]:
    """Open the images in the order of their numbers, with the authors' split and class names."""
    return _read(path).sets()


def open_unlabeled(path: str) -> ImageSet:
    """Open the images of all splits."""
    return _read(path).unlabeled()


def _read(path: str) -> Listing:
    root = _root(path)
    classes = _lines(root / CLASSES)
    return make_listing(
        root, classes.values(), _rows(root, {key: place for place, key in enumerate(classes)})
    )


def _rows(root: Path, numbers: dict[str, int]) -> Iterator[Row]:
    labels, is_train = _lines(root / LABELS), _lines(root / SPLIT)
    for number, name in _lines(root / IMAGES).items():
        label, mark = labels.get(number), is_train.get(number)
        if label not in numbers:
            raise UsageError(f"{root / LABELS} has no class of {CLASSES} for image {number}, {name}")
        if mark not in ("0", "1"):
            raise UsageError(f"{root / SPLIT} has neither 0 nor 1 for image {number}, {name}")
        yield Row("train" if mark == "1" else "test", numbers[label], f"images/{name}")


def _lines(path: Path) -> dict[str, str]:
    """Return the value of each number."""
    found = {}
    try:
        text = read_text(path)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    for line in text.splitlines():
        number, space, value = line.strip().partition(" ")
        if not space:
            raise UsageError(f"{path} should have a number and a value on each line; one is {line!r}")
        found[number] = value.strip()
    return found


def _root(path: str) -> Path:
    inside = Path(path, FOLDER)
    return inside if inside.is_dir() else Path(path)
