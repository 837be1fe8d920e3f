"""Read and write the index of tar shards: the offset, size, label and name of each image.

A folder of shards holds the tars (``00000.tar``), a ``00000.tar.json`` per tar that lists its samples, and
one ``index.json``. The index lists the classes, the number of samples that were left out and, for each tar,
its size, its number of samples and the SHA-256 of its ``.json``. All files are plain JSON. A tar or ``.json``
that changed after it was indexed is refused.

This module defines the format; :mod:`covpool.data.shards.write` creates an index from tars.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from covpool.errors import BadImageError, ShardError, UsageError
from covpool.storage.address import Address
from covpool.storage.cache import FileCache
from covpool.storage.files import digest, open_regular, read_file

FORMAT, VERSION = "covpool shards", 2
INDEX = "index.json"
# covpool writes no larger files: an index of a million shards has about 200 MB.
MAX_INDEX_BYTES, MAX_CONTENTS_BYTES = 1 << 28, 1 << 28
# A sample takes a block of the tar for its header, and more for its image.
BLOCK_BYTES = 512
COLUMNS = ("offsets", "sizes", "checksums", "labels")


@dataclass(frozen=True)
class Shard:
    """The index entry of a tar.

    Attributes:
        name: file name of the tar.
        bytes: size of the tar.
        samples: number of samples in the tar.
        contents: SHA-256 of the tar's ``.json``.
    """

    name: str
    bytes: int
    samples: int
    contents: str


@dataclass(frozen=True)
class ShardIndex:
    """The contents of ``index.json``: all shards of a set.

    Attributes:
        classes: class names, in the order of the labels.
        shards: the shards, in the order in which their samples are numbered.
        left_out: number of samples in the tars that are not indexed because they lack an image or a label.
    """

    classes: tuple[str, ...]
    shards: tuple[Shard, ...]
    left_out: int = 0

    @property
    def counts(self) -> list[int]:
        """Number of samples in each shard."""
        return [shard.samples for shard in self.shards]


@dataclass(frozen=True, eq=False)
class Contents:
    """The samples of one tar, one array entry per sample.

    Attributes:
        offsets: position of the first byte of each image.
        sizes: size of each image in bytes.
        checksums: :func:`checksum` of each image's bytes.
        labels: integer label of each image.
        names: original path of each image, for messages.
    """

    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    checksums: NDArray[np.int64]
    labels: NDArray[np.int64]
    names: tuple[str, ...]


def write_index(index: ShardIndex) -> bytes:
    """Return the bytes of ``index.json``."""
    shards = [asdict(shard) for shard in index.shards]
    return _write(classes=list(index.classes), shards=shards, left_out=index.left_out)


def read_index(data: bytes) -> ShardIndex:
    """Parse the bytes of an ``index.json``.

    Raises:
        ShardError: if the index is damaged or was not written by covpool.
    """
    kinds = {"classes": list, "shards": list, "left_out": int}
    fields = _read(INDEX, data, kinds, {"left_out": 0})
    if not all(isinstance(name, str) for name in fields["classes"]):
        raise ShardError(f"{INDEX} has a class whose name is not a string")
    return ShardIndex(tuple(fields["classes"]), tuple(map(_shard, fields["shards"])), fields["left_out"])


def write_contents(contents: Contents) -> bytes:
    """Return the bytes of a tar's ``.json``."""
    columns = {name: getattr(contents, name).tolist() for name in COLUMNS}
    return _write(**columns, names=list(contents.names))


def read_contents(data: bytes, shard: Shard, classes: int) -> Contents:
    """Parse the bytes of a tar's ``.json`` and check them against the index.

    Raises:
        ShardError: if the file is damaged or does not match the index.
    """
    where = f"{shard.name}.json"
    if digest(data) != shard.contents:
        raise ShardError(f"{where} is not the file that {INDEX} was made with; {remedy()}")
    fields = _read(where, data, dict.fromkeys((*COLUMNS, "names"), list))
    if {len(column) for column in fields.values()} != {shard.samples}:
        raise ShardError(f"{where} does not list {shard.samples} samples, as {INDEX} does; {remedy()}")
    if not all(isinstance(name, str) for name in fields["names"]):
        raise ShardError(f"{where} has a sample whose name is not a string")
    columns = {name: _numbers(where, name, fields[name]) for name in COLUMNS}
    # Subtract instead of adding: the sum of two large values could overflow.
    if (columns["offsets"] > shard.bytes).any() or (
        columns["sizes"] > shard.bytes - columns["offsets"]
    ).any():
        raise ShardError(f"{where} lists an image outside its tar")
    if (columns["labels"] >= classes).any():
        raise ShardError(f"{where} has a label beyond the {classes} classes of {INDEX}")
    return Contents(**columns, names=tuple(fields["names"]))


def checksum(data: bytes) -> int:
    """Return the CRC-32 of the bytes of an image.

    It is computed at every read. It detects flipped bits, missing parts and swapped blocks; a cryptographic
    hash would take five times as long.

    Example:
        >>> checksum(b"wren"), checksum(b"wner")
        (844703930, 862203617)
    """
    return zlib.crc32(data)


def remedy() -> str:
    """Return the advice for an index that does not match its tars."""
    return "'covpool shard --index' makes a new one from the tars"


def _write(**fields: Any) -> bytes:
    return json.dumps({"format": FORMAT, "version": VERSION, **fields}, separators=(",", ":")).encode()


def _read(
    where: str, data: bytes, kinds: Mapping[str, type], defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Parse the JSON and check the type of each field; older files may lack the fields with defaults."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ShardError(f"{where} is truncated or damaged: {error}") from error
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise ShardError(f"{where} is not a shard index written by covpool")
    if fields.get("version") != VERSION:
        version = fields.get("version")
        raise ShardError(f"{where} has version {version}; this covpool reads version {VERSION}; {remedy()}")
    fields = {**(defaults or {}), **fields}
    for name, kind in kinds.items():
        if not isinstance(fields.get(name), kind):
            raise ShardError(f"{where} has no {name}")
    return {name: fields[name] for name in kinds}


def _shard(fields: object) -> Shard:
    kinds = Shard.__annotations__
    if not isinstance(fields, dict) or fields.keys() != kinds.keys():
        raise ShardError(f"{INDEX} has a shard without its {', '.join(kinds)}")
    name, numbers = fields["name"], (fields["bytes"], fields["samples"])
    # The name becomes part of a path, so it must not point outside the folder.
    if not isinstance(name, str) or not name or name.startswith(".") or set(name) & set("/\\\0:"):
        raise ShardError(f"{INDEX} has a shard named {name!r}, which is not a plain file name")
    if any(type(number) is not int or not 0 <= number < 2**62 for number in numbers):
        raise ShardError(f"{INDEX} has no size or no number of samples for {name}")
    if fields["samples"] > fields["bytes"] // BLOCK_BYTES:
        raise ShardError(f"{INDEX} lists more samples of {name} than its {fields['bytes']:,} bytes can hold")
    if not isinstance(fields["contents"], str):
        raise ShardError(f"{INDEX} has no SHA-256 for {name}")
    return Shard(**fields)


def _numbers(where: str, name: str, column: Sequence[object]) -> NDArray[np.int64]:
    if any(type(value) is not int or not 0 <= value < 2**62 for value in column):
        raise ShardError(f"{where} has {name} that are not integers of at least 0")
    return np.array(column, dtype=np.int64)


class Place(Protocol):
    """A folder of shards."""

    def index(self) -> bytes:
        """Return the bytes of ``index.json``."""

    def check(self, index: ShardIndex) -> None:
        """Raise if a quick check shows that the index does not match the tars."""

    def opened(self, name: str, version: str, size: int | None = None) -> int:
        """Return a file descriptor for a file of the folder."""


class Disk:
    """A local folder, read in place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def index(self) -> bytes:
        """Return the bytes of ``index.json``."""
        try:
            return read_file(self.folder / INDEX, MAX_INDEX_BYTES)
        except FileNotFoundError as error:
            raise ShardError(f"{self.folder} has no {INDEX}; {remedy()}") from error

    def check(self, index: ShardIndex) -> None:
        """Raise unless every tar exists and has the size in the index."""
        for shard in index.shards:
            path = self.folder / shard.name
            if not path.is_file():
                raise ShardError(f"{path} is missing, but {INDEX} lists it")
            size = path.stat().st_size
            if size != shard.bytes:
                raise ShardError(
                    f"{path} has {size:,} bytes, but {INDEX} lists {shard.bytes:,}: it was truncated or "
                    f"changed; {remedy()}"
                )

    def opened(self, name: str, version: str, size: int | None = None) -> int:
        """Open a file for reading."""
        with open_regular(self.folder / name) as file:
            return os.dup(file.fileno())


class Store:
    """A remote folder that fsspec can open; complete files are downloaded to the cache."""

    def __init__(self, url: str, cache: FileCache) -> None:
        self.url, self.cache = url.rstrip("/"), cache

    def index(self) -> bytes:
        """Download ``index.json``. It is never cached, because it holds the versions of the other files."""
        try:
            return _address(f"{self.url}/{INDEX}").read(MAX_INDEX_BYTES)
        except FileNotFoundError as error:
            raise ShardError(f"{self.url}/{INDEX} does not exist") from error
        except (BadImageError, OSError) as error:
            raise ShardError(f"{self.url}/{INDEX} cannot be read: {error}") from error

    def check(self, index: ShardIndex) -> None:
        """Raise unless every tar fits the cache. Sizes are checked after download; asking for all is slow."""
        largest = max((shard.bytes for shard in index.shards), default=0)
        if largest > self.cache.limit:
            raise ShardError(f"a shard of {largest:,} bytes does not fit the cache of {self.cache.limit:,}")

    def opened(self, name: str, version: str, size: int | None = None) -> int:
        """Download a file unless it is cached, and open it."""
        return self.cache.opened(f"{self.url}/{name}", version, size)


def place(url: str | Path, cache: str | Path | None, cache_bytes: int) -> Place:
    """Return the folder of shards at a path or URL."""
    address = _address(url)
    if address.is_local:
        return Disk(Path(address.path))
    return Store(str(url), FileCache(cache or _cache_folder(), cache_bytes))


def has_index(url: str) -> bool:
    """Return whether there is a shard index at a URL.

    Raises:
        ShardError: if the storage does not answer.
    """
    return _address(f"{url.rstrip('/')}/{INDEX}").exists()


def _address(url: str | Path) -> Address:
    try:
        return Address.of(url)
    except UsageError as error:
        raise ShardError(str(error)) from error


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "covpool" / "shards"
