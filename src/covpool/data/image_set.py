"""Sets of images: names, labels, classes, and how to read each image."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, SupportsInt, overload, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from covpool.errors import BadImageError

# Names of files need not be UTF-8: what is not goes into a str and comes out of it unharmed.
ENCODING, ERRORS = "utf-8", "surrogateescape"


class Names(Sequence[str]):
    """A sequence of names, kept as one run of bytes and the numbers where each name ends.

    A list of strings takes up to twice the memory. And forked processes that only read it would copy all of
    it in time, since Python counts the references to each string in the string.

    Args:
        names: the names, in order; they are consumed as they come.

    Example:
        >>> names = Names(f"{i}.jpg" for i in range(1000))
        >>> len(names), names[0], names[-1], list(names[2:4])
        (1000, '0.jpg', '999.jpg', ['2.jpg', '3.jpg'])
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.joined = bytearray()
        self.ends: NDArray[np.int64] = np.fromiter(self._append(names), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> Names: ...

    def __getitem__(self, index: int | slice) -> str | Names:
        if isinstance(index, slice):
            return self._slice(range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"there are {len(self)} names; got {index}")
        index %= len(self)
        start = self.ends[index - 1] if index else 0
        return self.joined[start : self.ends[index]].decode(ENCODING, ERRORS)

    def take(self, indices: Iterable[int]) -> Names:
        """The names at some places."""
        return Names(self[int(index)] for index in indices)

    def _slice(self, places: range) -> Names:
        if places.step != 1 or not places:
            return self.take(places)
        part = Names()
        start = int(self.ends[places.start - 1]) if places.start else 0
        part.ends = self.ends[places.start : places.stop] - start
        part.joined = self.joined[start : self.ends[places.stop - 1]]
        return part

    def __repr__(self) -> str:
        return f"<{len(self)} names>"

    def _append(self, names: Iterable[str]) -> Iterator[int]:
        for name in names:
            self.joined += name.encode(ENCODING, ERRORS)
            yield len(self.joined)


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
        BadImageError: where it is far too large to be one, or its name is none.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115  # closed below
    except ValueError as error:  # a null character in the name
        raise BadImageError("unreadable", f"{path!r} is no name of a file: {error}") from error
    with file:
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


class UnlabelledImages(Protocol):
    """Images by number from 0. Of those in shards the list of shards is kept, never one of images."""

    def __len__(self) -> int:
        """How many there are."""

    def name(self, i: int) -> str:
        """What tells an image from the others: its id in the rows.

        Raises:
            OSError: where the file that it is in with others cannot be read.
            ShardError: likewise.
        """

    def read(self, i: int) -> bytes:
        """The bytes of an image's file.

        Raises:
            OSError: where this image cannot be read.
            BadImageError: where what is there cannot be an image.
            ShardError: where nothing can be read any more.
        """

    def groups(self, rows: int) -> Iterable[Group]:
        """What is best read by one process, in the order of the images; larger ones than ``rows`` are cut."""

    def fingerprint(self) -> str:
        """Tells these images from others, without reading them."""


class Group(NamedTuple):
    """Images in a row.

    Attributes:
        name: of the file that they are in; none for images in files of their own.
        images: how many.
    """

    name: str
    images: int
