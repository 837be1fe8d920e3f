"""What a layout on disk says: the images of all splits, with their classes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from covpool.data.image_set import ImageFiles, Names

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")
# Other names that people give their folders.
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


def split_names(split: str) -> tuple[str, ...]:
    """The splits that a word of the user's means, each once.

    Example:
        >>> split_names("Training + test+train")
        ('train', 'test')
    """
    words = [word.strip() for word in split.split("+")]
    return tuple(dict.fromkeys(SPLIT_OF.get(word.lower(), word) for word in words))


class Row(NamedTuple):
    """An image: its split, its class by number, and its path."""

    split: Split
    label: int
    name: str


@dataclass(frozen=True, eq=False)
class Listing:
    """All images that a layout has, whether they can be read or not.

    Attributes:
        root: the folder that names start from.
        classes: the name of each class.
        names: the path of each image.
        labels: its class.
        split_of: its split, by number in ``SPLITS``.
    """

    root: Path
    classes: tuple[str, ...]
    names: Names
    labels: NDArray[np.int32]
    split_of: NDArray[np.int8]

    def sets(self) -> dict[Split, ImageFiles]:
        """The images of each split that has any."""
        found = {}
        for number, split in enumerate(SPLITS):
            indices = np.flatnonzero(self.split_of == number)
            if len(indices):
                found[split] = ImageFiles(self.root, self.classes, self._names(indices), self.labels[indices])
        return found

    def _names(self, indices: NDArray[np.int64]) -> Names:
        first, last = int(indices[0]), int(indices[-1])
        # In a row, as folders have them, they are copied at once.
        return self.names[first : last + 1] if last - first < len(indices) else self.names.take(indices)


def make_listing(root: Path, classes: Iterable[str], rows: Iterable[Row]) -> Listing:
    """A listing from its rows, which are consumed as they come."""
    labels, splits = array("i"), array("b")

    def names() -> Iterator[str]:
        for row in rows:
            labels.append(row.label)
            splits.append(SPLITS.index(row.split))
            yield row.name

    compact = Names(names())
    return Listing(
        root, tuple(classes), compact, np.array(labels, dtype=np.int32), np.array(splits, dtype=np.int8)
    )
