"""Sets of images: names, labels, classes, and how to read each image."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, SupportsInt, overload, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from covpool.storage.address import Address, read_image
from covpool.storage.files import Digest

# File names need not be UTF-8. With these, any name becomes a str and the same bytes again.
ENCODING, ERRORS = "utf-8", "surrogateescape"


class Names(Sequence[str]):
    """A sequence of names, stored as one byte string and the offset where each name ends.

    A list of strings takes up to twice the memory. Forked processes would also copy such a list when they
    read it, because Python stores a reference count in each string.

    Args:
        names: the names, in order; an iterator is consumed.

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
        """Return the names at some indices."""
        return Names(self[int(index)] for index in indices)

    def _slice(self, indices: range) -> Names:
        if indices.step != 1 or not indices:
            return self.take(indices)
        part = Names()
        start = int(self.ends[indices.start - 1]) if indices.start else 0
        part.ends = self.ends[indices.start : indices.stop] - start
        part.joined = self.joined[start : self.ends[indices.stop - 1]]
        return part

    def __repr__(self) -> str:
        return f"<{len(self)} names>"

    def _append(self, names: Iterable[str]) -> Iterator[int]:
        for name in names:
            self.joined += name.encode(ENCODING, ERRORS)
            yield len(self.joined)


class Labels(Protocol):
    """The class of each image, by number: an array, or an object that looks labels up."""

    def __len__(self) -> int:
        """Return the number of images."""

    def __getitem__(self, i: int, /) -> SupportsInt:
        """Return the class of an image."""


class Group(NamedTuple):
    """Consecutive images that one process should read.

    Attributes:
        name: name of the file that holds the images; empty if each image is a separate file.
        images: the number of images.
    """

    name: str
    images: int


@runtime_checkable
class ImageSet(Protocol):
    """Images by number from 0, with or without labels. :class:`BaseSet` has most of the methods."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of each class; empty if the images have no labels."""

    @property
    def labels(self) -> Labels | None:
        """The class of each image, for ``numpy.asarray``; ``None`` if the images have no labels."""

    def __len__(self) -> int:
        """Return the number of images."""

    def name(self, i: int) -> str:
        """Return the id of an image, which is the same on every machine, for example its path in the set.

        Raises:
            OSError: if the name is stored in a file that cannot be read.
        """

    def label(self, i: int) -> int:
        """Return the class of an image by number; -1 if the images have no labels."""

    def read(self, i: int) -> bytes:
        """Return the bytes of an image file.

        Raises:
            OSError: if this image cannot be read.
            BadImageError: if the bytes cannot be an image.
            ShardError: if no further image can be read.
        """

    def group_sizes(self) -> Sequence[int] | None:
        """Return the number of images in each shard or row group; ``None`` if images are separate files.

        Sets with groups are read group by group: they cannot be joined, divided or drawn from at random.
        """

    def near(self, i: int) -> range:
        """Return the images in the same group, which are cheap to read after this one."""

    def some(self, count: int, seed: int) -> ImageSet:
        """Return a set of a few groups, chosen by the seed, with at least ``count`` images."""

    def groups(self, rows: int) -> Iterable[Group]:
        """Return the units of bulk inference, in order, of about ``rows`` images; larger ones are divided."""

    def fingerprint(self) -> str:
        """Return a hash of classes, labels and names, which is equal for copies of a data set."""

    def stamp(self) -> str:
        """Return a hash of names, sizes and dates, which changes when a file of this copy does."""

    def size(self, i: int) -> int | None:
        """Return the bytes of an image's own file without reading it; ``None`` if it has none."""


class BaseSet:
    """Default methods of an :class:`ImageSet` whose images are separate files."""

    def label(self: ImageSet, i: int) -> int:
        """Return the class of an image by number; -1 if the images have no labels."""
        return -1 if self.labels is None else int(self.labels[i])

    def group_sizes(self) -> Sequence[int] | None:
        """Return ``None``: there are no groups."""
        return None

    def near(self: ImageSet, i: int) -> range:
        """Return all images."""
        return range(len(self))

    def some(self: ImageSet, count: int, seed: int) -> ImageSet:
        """Return the set itself."""
        return self

    def groups(self: ImageSet, rows: int) -> Iterable[Group]:
        """Return one group."""
        return [Group("", len(self))]

    def fingerprint(self: ImageSet) -> str:
        """Return a hash of classes, labels and names."""
        labels = b"" if self.labels is None else np.asarray(self.labels, dtype=np.int64).tobytes()
        names = (self.name(i).encode(ENCODING, ERRORS) + b"\0" for i in range(len(self)))
        return digest_of(self.classes, labels, *names)

    def stamp(self: ImageSet) -> str:
        """Return the fingerprint."""
        return self.fingerprint()

    def size(self, i: int) -> int | None:
        """Return ``None``: the size of a file is not known."""
        return None


def digest_of(classes: tuple[str, ...], *parts: bytes) -> str:
    """Return the fingerprint of a set with these classes and contents."""
    digest = Digest(repr(classes).encode(ENCODING, ERRORS))
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class ImageFiles(BaseSet):
    """Labeled images in files.

    Attributes:
        root: the folder that the names start from.
        classes: the name of each class.
        names: a path for each image, with slashes, relative to ``root`` or absolute.
        labels: the class of each image.
        table: the folder of the table that lists the images, which they may not leave by a link.
    """

    root: Path
    classes: tuple[str, ...]
    names: Names
    labels: NDArray[np.int32]
    table: Address | None = None

    def __len__(self) -> int:
        return len(self.names)

    def name(self, i: int) -> str:
        """Return the path of an image."""
        return self.names[i]

    def read(self, i: int) -> bytes:
        """Return the bytes of an image."""
        name = self.names[i]
        if self.table is not None:
            self.table.listed(name)
        return read_image(os.path.join(self.root, name))

    def size(self, i: int) -> int | None:
        """Return the size of a file; ``None`` if it is missing."""
        try:
            return os.stat(os.path.join(self.root, self.names[i])).st_size
        except (OSError, ValueError):
            return None


class Derived(BaseSet):
    """A set that consists of images of other sets."""

    def find(self, i: int) -> tuple[ImageSet, int]:
        """Return the set of an image, and its number there."""
        raise NotImplementedError

    def name(self, i: int) -> str:
        """Return the name in its own set."""
        images, place = self.find(i)
        return images.name(place)

    def read(self, i: int) -> bytes:
        """Return the bytes of an image."""
        images, place = self.find(i)
        return images.read(place)

    def size(self, i: int) -> int | None:
        """Return the size of an image's own file."""
        images, place = self.find(i)
        return images.size(place)


@dataclass(frozen=True, eq=False)
class Subset(Derived):
    """Some images of a labeled set."""

    images: ImageSet
    indices: NDArray[np.int64]
    labels: NDArray[np.int32] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        labels = np.asarray(self.images.labels, dtype=np.int32)[self.indices]
        object.__setattr__(self, "labels", labels)

    @property
    def classes(self) -> tuple[str, ...]:
        """All classes of the set, including those without an image in the subset."""
        return self.images.classes

    def __len__(self) -> int:
        return len(self.indices)

    def find(self, i: int) -> tuple[ImageSet, int]:
        """Return the set of an image, and its number there."""
        return self.images, int(self.indices[i])

    def fingerprint(self) -> str:
        """Return a hash of the set's fingerprint and the indices."""
        return digest_of(self.classes, self.images.fingerprint().encode() + self.indices.tobytes())


@dataclass(frozen=True, eq=False)
class Joined(Derived):
    """Several labeled sets in sequence.

    Attributes:
        sets: the sets, which have the same classes.
    """

    sets: tuple[ImageSet, ...]
    labels: NDArray[np.int32] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        labels = np.concatenate([np.asarray(images.labels, dtype=np.int32) for images in self.sets])
        object.__setattr__(self, "labels", labels)

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes of each set."""
        return self.sets[0].classes

    def __len__(self) -> int:
        return len(self.labels)

    def fingerprint(self) -> str:
        """Return a hash of the sets' fingerprints."""
        return digest_of(self.classes, "".join(images.fingerprint() for images in self.sets).encode())

    def find(self, i: int) -> tuple[ImageSet, int]:
        """Return the set of an image, and its number there."""
        for images in self.sets:
            if i < len(images):
                return images, i
            i -= len(images)
        raise IndexError(f"there are {len(self)} images")


@dataclass(frozen=True, eq=False)
class Relabelled(Derived):
    """A labeled set whose labels refer to another list of classes.

    Attributes:
        images: the set.
        classes: all classes of the set, and perhaps others, in any order.
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

    def find(self, i: int) -> tuple[ImageSet, int]:
        """Return the set of an image, and its number there."""
        return self.images, i

    def fingerprint(self) -> str:
        """Return a hash of the classes and the set's fingerprint."""
        return digest_of(self.classes, self.images.fingerprint().encode())


def class_counts(images: ImageSet) -> NDArray[np.int64]:
    """Return the number of images of each class."""
    return np.bincount(np.asarray(images.labels, dtype=np.int64), minlength=len(images.classes))
