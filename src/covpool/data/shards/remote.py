"""Folders of shards: on a local disk, or in object storage with a cache on a local disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from covpool.data.shards.index import INDEX, MAX_INDEX_BYTES, ShardIndex, remedy
from covpool.errors import BadImageError, ShardError, UsageError
from covpool.storage.address import Address
from covpool.storage.cache import FileCache
from covpool.storage.files import open_regular, read_file
from covpool.storage.remote import patiently


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
        ShardError: if the storage cannot be asked. ``exists`` of fsspec returns False for errors, which would
            silently drop a split.
    """
    index = f"{url.rstrip('/')}/{INDEX}"
    address = _address(index)

    def attempt() -> bool:
        try:
            address.store.cat_file(address.path, start=0, end=1)
        except FileNotFoundError:
            return False
        except Exception as error:
            # Without permission to list files, object storage answers 403 for every missing file.
            if isinstance(error, PermissionError) or getattr(error, "status", None) == 403:
                return False
            raise
        return True

    return patiently(index, attempt)


def _address(url: str | Path) -> Address:
    try:
        return Address.of(url)
    except UsageError as error:
        raise ShardError(str(error)) from error


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "covpool" / "shards"
