"""A set of images in tar shards.

Only the bytes that the index lists are read: a tar is neither parsed nor unpacked. Reading uses no file
position that processes could share, so workers may be forked with open tars. Spawned workers receive the list
of shards and open the tars themselves.
"""

from __future__ import annotations

import io
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from covpool.data.image_set import BaseSet, Group, digest_of
from covpool.data.order import some_groups
from covpool.data.shards.index import (
    MAX_CONTENTS_BYTES,
    Contents,
    Place,
    ShardIndex,
    checksum,
    place,
    read_contents,
    read_index,
    write_index,
)
from covpool.errors import BadImageError, ShardError
from covpool.storage.address import MAX_FILE_BYTES
from covpool.storage.files import digest
from covpool.storage.remote import cannot_go_on, is_passing

V = TypeVar("V")

# Tars that a process keeps open. Few: opening is quick, and the cache cannot remove an open tar.
OPEN_TARS = 8
# Shards whose offsets and labels a process keeps, at 32 bytes per sample; more than a window should have.
KEPT_CONTENTS = 64


def open_shards(
    url: str | Path, *, cache: str | Path | None = None, cache_bytes: int = 100_000_000_000
) -> ShardSet:
    """Open a folder of shards.

    Args:
        url: the folder with ``index.json``: a path or a URL for fsspec, such as ``s3://bucket/train``.
        cache: a local folder for shards in object storage, ``~/.cache/covpool/shards`` by default. All
            processes of a machine may share it.
        cache_bytes: the maximum size of that folder. If it cannot hold two windows of shards, shards are
            downloaded more than once per epoch.

    Raises:
        ShardError: if the index is missing or does not match the tars.
    """
    where = place(url, cache, cache_bytes)
    index = read_index(where.index())
    where.check(index)
    return ShardSet(index, where)


class ShardSet(BaseSet):
    """The images of shards, numbered from shard to shard."""

    def __init__(self, index: ShardIndex, where: Place) -> None:
        self.index, self.where = index, where
        self._ends = list(accumulate(index.counts))
        self._tars = _Kept[int](OPEN_TARS, self._open, os.close)
        self._contents = _Kept[Contents](KEPT_CONTENTS, self._read_columns)
        self._names = _Kept[tuple[str, ...]](1, lambda shard: self._read_contents(shard).names)

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardSet, (self.index, self.where)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of each class."""
        return self.index.classes

    @property
    def labels(self) -> Sequence[int]:
        """The class of each sample, from the index of its shard; ``numpy.asarray`` reads every index."""
        return _Labels(self)

    def label(self, i: int) -> int:
        """Return the class of a sample."""
        shard, place = self._find(i)
        return int(self._contents[shard].labels[place])

    def name(self, i: int) -> str:
        """Return the original name of an image; quick for consecutive samples."""
        shard, place = self._find(i)
        return self._names[shard][place]

    def group_sizes(self) -> list[int]:
        """Return the number of samples in each shard."""
        return self.index.counts

    def groups(self, rows: int) -> list[Group]:
        """Return a group per shard."""
        return [Group(PurePosixPath(shard.name).stem, shard.samples) for shard in self.index.shards]

    def fingerprint(self) -> str:
        """Return a hash of the classes and of the index of each shard, which has checksums of the images."""
        return digest_of(self.classes, repr([shard.contents for shard in self.index.shards]).encode())

    def stamp(self) -> str:
        """Return a hash of the index."""
        return digest(write_index(self.index))

    def some(self, count: int, seed: int) -> ShardSet:
        """Return a set of a few shards, chosen by the seed, with at least ``count`` samples."""
        shards = tuple(self.index.shards[i] for i in some_groups(self.index.counts, count, seed))
        return ShardSet(replace(self.index, shards=shards), self.where)

    def near(self, i: int) -> range:
        """Return the samples of the same shard."""
        shard, place = self._find(i)
        return range(i - place, self._ends[shard])

    def read(self, i: int) -> bytes:
        """Return the bytes of an image.

        Raises:
            BadImageError: if they differ from the bytes that were indexed.
            ShardError: if the shard cannot be read.
        """
        shard, place = self._find(i)
        contents, name = self._contents[shard], self.index.shards[shard].name
        offset, size = int(contents.offsets[place]), int(contents.sizes[place])
        if size > MAX_FILE_BYTES:
            raise BadImageError("too large", f"it has {size:,} bytes in {name}")
        try:
            data = _read_at(self._tars[shard], size, offset)
        except OSError as error:
            if is_passing(error) or isinstance(error, FileNotFoundError):
                raise cannot_go_on(name, error) from error
            raise
        if len(data) < size:
            raise BadImageError("truncated", f"{name} ends before it does")
        if checksum(data) != contents.checksums[place]:
            raise BadImageError("unreadable", f"{name} holds other bytes than when it was indexed")
        return data

    def all_labels(self) -> NDArray[np.int64]:
        """Return the class of every sample, from the index of every shard."""
        parts = [self._contents[shard].labels for shard in range(len(self._ends))]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _find(self, i: int) -> tuple[int, int]:
        """Return the shard of a sample, and its place in it."""
        if not 0 <= i < len(self):
            raise IndexError(f"there are {len(self)} samples; got {i}")
        shard = bisect_right(self._ends, i)
        return shard, i - self._ends[shard] + self.index.shards[shard].samples

    def _open(self, shard: int) -> int:
        known = self.index.shards[shard]
        return self.where.opened(known.name, known.contents, known.bytes)

    def _read_contents(self, shard: int) -> Contents:
        known = self.index.shards[shard]
        with io.FileIO(self.where.opened(f"{known.name}.json", known.contents)) as file:
            if os.fstat(file.fileno()).st_size > MAX_CONTENTS_BYTES:
                raise ShardError(f"{known.name}.json has more than {MAX_CONTENTS_BYTES:,} bytes")
            return read_contents(file.readall(), known, len(self.classes))

    def _read_columns(self, shard: int) -> Contents:
        # Names are needed for unreadable images alone, and would take most of the memory.
        return replace(self._read_contents(shard), names=())


class _Labels(Sequence[int]):
    """The labels of shards; numpy can make an array of all of them."""

    def __init__(self, images: ShardSet) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    @overload
    def __getitem__(self, i: int) -> int: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[int]: ...
    def __getitem__(self, i: int | slice) -> int | Sequence[int]:
        if isinstance(i, slice):
            return [self._images.label(each) for each in range(*i.indices(len(self)))]
        return self._images.label(i + len(self) if i < 0 else i)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return self._images.all_labels().astype(dtype or np.int64, copy=False)


class _Kept(Generic[V]):
    """The values that were used last, up to a number of them."""

    def __init__(self, size: int, make: Callable[[int], V], drop: Callable[[V], None] | None = None) -> None:
        self._size, self._make, self._drop = size, make, drop
        self._values: dict[int, V] = {}

    def __getitem__(self, key: int) -> V:
        if key in self._values:
            value = self._values.pop(key)
        else:
            self._shrink(self._size - 1)
            value = self._make(key)
        self._values[key] = value  # now the last to be dropped
        return value

    def __del__(self) -> None:
        self._shrink(0)

    def _shrink(self, size: int) -> None:
        while len(self._values) > size:
            value = self._values.pop(next(iter(self._values)))
            if self._drop is not None:
                self._drop(value)


if sys.platform == "win32":

    def _read_at(descriptor: int, size: int, offset: int) -> bytes:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, size)

else:
    _read_at = os.pread
