"""Where shards are: on a disk, or in a store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

import fsspec
from fsspec.implementations.local import LocalFileSystem

from covpool.data.shards.cache import FileCache, patiently
from covpool.data.shards.index import INDEX, ShardError, ShardIndex, remedy


class Place(Protocol):
    """A folder of shards."""

    def index(self) -> bytes:
        """The bytes of ``index.json``."""

    def check(self, index: ShardIndex) -> None:
        """Raise if it is seen at once that the index is not that of the tars."""

    def open(self, name: str, version: str, size: int | None = None) -> int:
        """A descriptor of one of its files."""


class Disk:
    """A local folder: its files are read where they are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def index(self) -> bytes:
        """Read."""
        try:
            return (self.folder / INDEX).read_bytes()
        except FileNotFoundError as error:
            raise ShardError(f"{self.folder} has no {INDEX}; {remedy()}") from error

    def check(self, index: ShardIndex) -> None:
        """Every tar has the size of its index."""
        for shard in index.shards:
            path = self.folder / shard.name
            if not path.is_file():
                raise ShardError(f"{path} is missing, which {INDEX} lists")
            size = path.stat().st_size
            if size != shard.bytes:
                raise ShardError(
                    f"{path} has {size:,} bytes where {INDEX} says {shard.bytes:,}: it was cut short or "
                    f"changed; {remedy()}"
                )

    def open(self, name: str, version: str, size: int | None = None) -> int:
        """Open."""
        return os.open(self.folder / name, os.O_RDONLY | getattr(os, "O_BINARY", 0))


class Store:
    """Anything else that fsspec opens: files are downloaded whole."""

    def __init__(self, url: str, cache: FileCache) -> None:
        self.url, self.cache = url.rstrip("/"), cache

    def index(self) -> bytes:
        """Read anew each time, since it says which version the other files have."""

        def attempt() -> bytes:
            store, remote = fsspec.core.url_to_fs(f"{self.url}/{INDEX}")
            data: bytes = store.cat_file(remote)
            return data

        return patiently(f"{self.url}/{INDEX}", attempt)

    def check(self, index: ShardIndex) -> None:
        """Every tar fits the cache. Its size is checked after the download: asking for all takes long."""
        largest = max((shard.bytes for shard in index.shards), default=0)
        if largest > self.cache.limit:
            raise ShardError(f"a shard of {largest:,} bytes does not fit the cache of {self.cache.limit:,}")

    def open(self, name: str, version: str, size: int | None = None) -> int:
        """Download unless it is there, and open."""
        return self.cache.open(f"{self.url}/{name}", version, size)


def place(url: str | Path, cache: str | Path | None, cache_bytes: int) -> Place:
    """The place of a path or URL."""
    store, path = _open_store(url)
    if isinstance(store, LocalFileSystem):
        return Disk(Path(path))
    return Store(str(url), FileCache(cache or _cache_folder(), cache_bytes))


def has_index(url: str) -> bool:
    """Whether there are shards at an address.

    Raises:
        ShardError: if the store does not tell. To take that for a no, as ``exists`` of fsspec does, would
            lose a split in silence.
    """
    index = f"{url.rstrip('/')}/{INDEX}"
    store, remote = _open_store(index)

    def attempt() -> bool:
        try:
            store.cat_file(remote, start=0, end=1)
        except FileNotFoundError:
            return False
        except Exception as error:
            # To those who may not list its files, a store says so of any that it does not have.
            if isinstance(error, PermissionError) or getattr(error, "status", None) == 403:
                return False
            raise
        return True

    return patiently(index, attempt)


def _open_store(url: str | Path) -> tuple[Any, str]:
    """The file system of an address, and what it calls the address."""
    try:
        store, path = fsspec.core.url_to_fs(str(url))
    except (ImportError, ValueError) as error:
        raise ShardError(f"{url} cannot be opened: {error}") from error
    return store, path


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "covpool" / "shards"
