"""Images without labels, and how they are divided: one unit of work gives one file of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol


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


@dataclass(frozen=True)
class Unit:
    """A range of images whose rows go into one file.

    Attributes:
        name: of that file, without its extension.
        start: the first image.
        stop: one past the last.
    """

    name: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def parts(self, size: int) -> Iterator[range]:
        """The mini-batches: they never reach from one unit into another, so rows depend on no neighbour."""
        for start in range(self.start, self.stop, size):
            yield range(start, min(start + size, self.stop))


def divide(images: UnlabelledImages, rows: int) -> list[Unit]:
    """The units of some images: a group each, or several where a group has more than ``rows``."""
    units: list[Unit] = []
    start = 0
    for group in images.groups(rows):
        stop = start + group.images
        for first in range(start, stop, rows):
            name = f"{len(units):07d}-{group.name}" if group.name else f"{len(units):07d}"
            units.append(Unit(name, first, min(first + rows, stop)))
        start = stop
    return units
