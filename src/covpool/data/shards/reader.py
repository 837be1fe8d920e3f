"""A set of images in tar shards.

Of a tar only the bytes are read that its index names: it is not parsed here, let alone unpacked. Reading has
no position that processes could share, so workers may be forked with tars open; those that are spawned
receive the list of shards and open their own.
"""

from __future__ import annotations

import hashlib
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from covpool.data.image_set import MAX_FILE_BYTES, ImageSet, Joined, Relabelled, Subset
from covpool.data.order import permutation
from covpool.data.shards.index import Contents, ShardIndex, checksum, read_contents, read_index
from covpool.data.shards.remote import Place, place
from covpool.errors import BadImageError

V = TypeVar("V")

# Tars that a process keeps open. Few: opening is quick, and an open one is not removed from the cache.
OPEN_TARS = 8
# Shards of which a process keeps the offsets and labels, at 32 bytes a sample; more than a window should
# have.
KEPT_CONTENTS = 64


def open_shards(
    url: str | Path, *, cache: str | Path | None = None, cache_bytes: int = 100_000_000_000
) -> ShardSet:
    """Open a folder of shards.

    Args:
        url: the folder with ``index.json``: a path, or anything that fsspec opens, as ``s3://bucket/train``.
        cache: a local folder for the shards of a store, ``~/.cache/covpool/shards`` if not given. All
            processes of a machine may share it.
        cache_bytes: how large that folder may become. It should hold two windows of shards, or shards are
            downloaded more than once in an epoch.

    Raises:
        ShardError: if there is no index, or it is not that of the tars.
    """
    where = place(url, cache, cache_bytes)
    index = read_index(where.index())
    where.check(index)
    return ShardSet(index, where)


class ShardSet:
    """The images of shards, numbered from shard to shard.

    Args:
        index: of the shards.
        where: their place.
    """

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
        """Their names, in the order of the labels."""
        return self.index.classes

    @property
    def labels(self) -> Sequence[int]:
        """By sample. One label needs the index of its shard, ``numpy.asarray`` of all needs that of all."""
        return _Labels(self)

    def label(self, i: int) -> int:
        """The class of a sample."""
        shard, place = self._find(i)
        return int(self._contents[shard].labels[place])

    def name(self, i: int) -> str:
        """Where the image came from. Quick for samples of one shard in a row."""
        shard, place = self._find(i)
        return self._names[shard][place]

    def some(self, count: int, seed: int) -> ShardSet:
        """A set of few shards, drawn by the seed, with so many samples at least; the others are not read."""
        order = permutation(len(self.index.shards), "some shards", seed).tolist()
        sizes = list(accumulate(self.index.shards[i].samples for i in order))
        drawn = order[: bisect_right(sizes, count - 1) + 1]
        shards = tuple(self.index.shards[i] for i in sorted(drawn))
        return ShardSet(replace(self.index, shards=shards), self.where)

    def near(self, i: int) -> range:
        """The samples of the same shard, which cost no further download."""
        shard, place = self._find(i)
        return range(i - place, self._ends[shard])

    def read(self, i: int) -> bytes:
        """The bytes of an image.

        Raises:
            BadImageError: if they are not those that were indexed.
            ShardError: if the shard cannot be had.
        """
        shard, place = self._find(i)
        contents, name = self._contents[shard], self.index.shards[shard].name
        offset, size = int(contents.offsets[place]), int(contents.sizes[place])
        if size > MAX_FILE_BYTES:
            raise BadImageError("too large", f"it has {size:,} bytes in {name}")
        data = _read_at(self._tars[shard], size, offset)
        if len(data) < size:
            raise BadImageError("truncated", f"{name} ends before it does")
        if checksum(data) != contents.checksums[place]:
            raise BadImageError("unreadable", f"{name} holds other bytes than when it was indexed")
        return data

    def all_labels(self) -> NDArray[np.int64]:
        """Of every sample, from the index of every shard."""
        parts = [self._contents[shard].labels for shard in range(len(self._ends))]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _find(self, i: int) -> tuple[int, int]:
        """The shard of a sample, and its place in it."""
        if not 0 <= i < len(self):
            raise IndexError(f"there are {len(self)} samples; got {i}")
        shard = bisect_right(self._ends, i)
        return shard, i - self._ends[shard] + self.index.shards[shard].samples

    def _open(self, shard: int) -> int:
        known = self.index.shards[shard]
        return self.where.open(known.name, known.contents, known.bytes)

    def _read_contents(self, shard: int) -> Contents:
        known = self.index.shards[shard]
        with open(self.where.open(f"{known.name}.json", known.contents), "rb") as file:
            return read_contents(file.read(), known, len(self.classes))

    def _read_columns(self, shard: int) -> Contents:
        # The names are for the few bad images, and would take more memory than all the rest.
        return replace(self._read_contents(shard), names=())


class _Labels(Sequence[int]):
    """The labels of shards, without an array of them all unless numpy asks."""

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
    """What was asked for last, up to a number of things."""

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


def fingerprint(images: ImageSet) -> str:
    """What tells a set from another, so that a run is not resumed on other images than it began with."""
    digest = hashlib.sha256(repr(images.classes).encode("utf-8", "surrogateescape"))
    if isinstance(images, ShardSet):
        digest.update(repr([shard.contents for shard in images.index.shards]).encode())
    elif isinstance(images, Subset):
        digest.update(fingerprint(images.images).encode() + images.indices.tobytes())
    elif isinstance(images, Relabelled):  # whose own classes are in the digest already
        digest.update(fingerprint(images.images).encode())
    elif isinstance(images, Joined):
        digest.update("".join(map(fingerprint, images.sets)).encode())
    else:
        digest.update(np.asarray(images.labels, dtype=np.int64).tobytes())
        for i in range(len(images)):
            digest.update(images.name(i).encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()
