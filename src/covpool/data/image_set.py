"""What the rest of covpool knows of images: how many there are, their classes, names and bytes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, SupportsInt, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from covpool.data.bad_image import BadImageError
from covpool.data.names import Names

# A photograph at Pillow's limit of pixels, uncompressed and with 16 bits a colour, is half of this.
MAX_FILE_BYTES = 1 << 30


class Labels(Protocol):
    """The class of each image, by number: an array, or something that looks it up."""

    def __len__(self) -> int:
        """As many as there are images."""

    def __getitem__(self, i: int, /) -> SupportsInt:
        """The class of an image."""


@runtime_checkable
class ImageSet(Protocol):
    """Images with labels, by number from 0: files on a disk, or samples in shards."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of each class."""

    @property
    def labels(self) -> Labels:
        """The class of each image, by number. ``numpy.asarray`` makes an array of it."""

    def __len__(self) -> int:
        """How many images there are."""

    def name(self, i: int) -> str:
        """What tells an image from the others, and is the same on every machine, as its path in the set."""

    def read(self, i: int) -> bytes:
        """The bytes of an image's file.

        Raises:
            OSError: where the file cannot be read.
            BadImageError: where what is there cannot be an image.
        """


def read_file(path: str) -> bytes:
    """The bytes of a file that should be an image.

    Raises:
        OSError: where it cannot be read.
        BadImageError: where it is far too large to be one.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_FILE_BYTES:
            raise BadImageError("too large", f"the file has {size:,} bytes")
        return file.read()


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Images in files.

    Attributes:
        root: the folder that the names start from.
        classes: the name of each class.
        names: a path for each image, by slashes, from ``root`` or from the root of the disk.
        labels: the class of each image.
    """

    root: Path
    classes: tuple[str, ...]
    names: Names
    labels: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.names)

    def name(self, i: int) -> str:
        """The path of an image."""
        return self.names[i]

    def read(self, i: int) -> bytes:
        """The bytes of an image."""
        return read_file(os.path.join(self.root, self.names[i]))


@dataclass(frozen=True, eq=False)
class Subset:
    """Some images of a set.

    Attributes:
        images: the set.
        indices: the numbers of the images in it.
    """

    images: ImageSet
    indices: NDArray[np.int64]
    labels: NDArray[np.int32] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        labels = np.asarray(self.images.labels, dtype=np.int32)[self.indices]
        object.__setattr__(self, "labels", labels)

    @property
    def classes(self) -> tuple[str, ...]:
        """Those of the whole set, also where none of their images is among these."""
        return self.images.classes

    def __len__(self) -> int:
        return len(self.indices)

    def name(self, i: int) -> str:
        """As in the whole set."""
        return self.images.name(int(self.indices[i]))

    def read(self, i: int) -> bytes:
        """As in the whole set."""
        return self.images.read(int(self.indices[i]))


@dataclass(frozen=True, eq=False)
class Joined:
    """Several sets as one, in a row.

    Attributes:
        sets: of the same classes.
    """

    sets: tuple[ImageSet, ...]
    labels: NDArray[np.int32] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        labels = np.concatenate([np.asarray(images.labels, dtype=np.int32) for images in self.sets])
        object.__setattr__(self, "labels", labels)

    @property
    def classes(self) -> tuple[str, ...]:
        """Those of each."""
        return self.sets[0].classes

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, i: int) -> str:
        """As in its own set."""
        images, place = self._find(i)
        return images.name(place)

    def read(self, i: int) -> bytes:
        """As in its own set."""
        images, place = self._find(i)
        return images.read(place)

    def _find(self, i: int) -> tuple[ImageSet, int]:
        for images in self.sets:
            if i < len(images):
                return images, i
            i -= len(images)
        raise IndexError(f"there are {len(self)} images")


@dataclass(frozen=True, eq=False)
class Relabelled:
    """A set with its labels among other classes.

    Attributes:
        images: the set.
        classes: all of its own, and perhaps others, in any order.
    """

    images: ImageSet
    classes: tuple[str, ...]
    labels: NDArray[np.int32] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        number = {name: i for i, name in enumerate(self.classes)}
        numbers = np.array([number[name] for name in self.images.classes], dtype=np.int32)
        object.__setattr__(self, "labels", numbers[np.asarray(self.images.labels, dtype=np.int64)])

    def __len__(self) -> int:
        return len(self.images)

    def name(self, i: int) -> str:
        """As in the set."""
        return self.images.name(i)

    def read(self, i: int) -> bytes:
        """As in the set."""
        return self.images.read(i)


def class_counts(images: ImageSet) -> NDArray[np.int64]:
    """How many images each class has."""
    return np.bincount(np.asarray(images.labels, dtype=np.int64), minlength=len(images.classes))
