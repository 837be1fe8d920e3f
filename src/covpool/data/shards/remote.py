"""Shards in object storage, cached on a local disk.

A shard is downloaded under a temporary name and renamed once it is complete. A process locks a shard (flock)
exclusively while it downloads it, and shared while it reads it; locked shards are never removed. The shard
opened longest ago is removed first. If all are locked, the folder grows over its limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from covpool.data.shards.index import INDEX, ShardIndex, remedy
from covpool.errors import ShardError

if sys.platform != "win32":
    import fcntl

T = TypeVar("T")

# Stores fail now and then: seconds to wait before trying again.
PAUSES = (0.5, 2.0, 8.0)
# The endings of the cache's files: of those that are whole, and of those on their way.
WHOLE, PART = ".covpool-shard", ".covpool-part"
# A download takes seconds; so often those who wait for it look whether it is there.
POLL_SECONDS = 0.02


class FileCache:
    """A folder of downloaded files.

    Args:
        folder: made if it does not exist. Files in it that are not the cache's are left alone.
        limit: of the bytes of the cache's files.
    """

    def __init__(self, folder: str | Path, limit: int) -> None:
        if sys.platform == "win32":
            raise ShardError("shards in a store need locks of files that Windows lacks: copy them to a disk")
        self.folder, self.limit = Path(folder), limit
        self.folder.mkdir(parents=True, exist_ok=True)

    def open(self, url: str, version: str, size: int | None = None) -> int:
        """Download a file unless it is there, and open it.

        Args:
            url: where it is, for fsspec.
            version: tells what is at that place now from what was there before.
            size: in bytes, if known; a file of another size is not accepted.

        Returns:
            A file descriptor to read from. Closing it allows the file to be removed.
        """
        name = hashlib.sha256(f"{url}\n{version}".encode()).hexdigest()[:32]
        try:
            return self._open(self.folder / f"{name}{WHOLE}", self.folder / f"{name}{PART}", url, size)
        except OSError as error:  # of the folder: those of the store are told already
            raise ShardError(f"the cache in {self.folder} cannot be used: {error}") from error

    def _open(self, path: Path, part: Path, url: str, size: int | None) -> int:
        while True:
            descriptor = _hold(path, os.O_RDONLY, fcntl.LOCK_SH)
            if descriptor is not None:
                os.utime(descriptor)
                return descriptor
            self.folder.mkdir(parents=True, exist_ok=True)  # somebody may have tidied up
            holding = _hold(part, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if holding is None:
                time.sleep(POLL_SECONDS)
                continue
            try:
                if path.exists():  # another process was quicker
                    part.unlink()
                else:
                    self._make_room(size or 0)
                    _download(url, part, size)
                    os.replace(part, path)
                    self._make_room(0)  # what others downloaded meanwhile had no size yet
            except BaseException:
                part.unlink(missing_ok=True)
                raise
            finally:
                os.close(holding)

    def _make_room(self, size: int) -> None:
        """Remove what was opened longest ago, so that ``size`` more bytes fit."""
        found = []
        for path in self.folder.iterdir():
            if path.suffix not in (WHOLE, PART):
                continue
            try:
                status = path.stat()
            except FileNotFoundError:  # another process is making room too
                continue
            found.append((status.st_mtime_ns, status.st_size, path))
        total = size + sum(length for _, length, _ in found)
        for _, length, path in sorted(found):
            if total <= self.limit:
                return
            descriptor = _hold(path, os.O_RDONLY, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if descriptor is not None:
                path.unlink()
                os.close(descriptor)
                total -= length


def _hold(path: Path, flags: int, lock: int) -> int | None:
    """Open a file and lock it; ``None`` if there is none, or another process keeps us from locking it."""
    while True:
        try:
            descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            return None
        is_ours = False
        try:
            fcntl.flock(descriptor, lock)
            # Between the opening and the lock the file may have been removed, or moved to its own name.
            with contextlib.suppress(FileNotFoundError):
                is_ours = path.stat().st_ino == os.fstat(descriptor).st_ino
        except BlockingIOError:
            return None
        finally:
            if not is_ours:
                os.close(descriptor)
        if is_ours:
            return descriptor


def _download(url: str, path: Path, size: int | None) -> None:
    """Download into a file, and again if it comes out in another size: a connection can end early."""

    def attempt() -> None:
        # Made anew, not kept: one that came through a fork can wait forever.
        store, remote = fsspec.core.url_to_fs(url)
        store.get_file(remote, str(path))
        length = path.stat().st_size
        if size is not None and length != size:
            raise ShardError(f"it has {length:,} bytes where the index says {size:,}")

    patiently(url, attempt)


def patiently(url: str, attempt: Callable[[], T], done: str = "read") -> T:
    """Ask a store for something, which may fail a few times.

    Args:
        url: of what is asked for.
        attempt: asks.
        done: what is to be done to it, for the message.

    Raises:
        ShardError: with what went wrong the last time.
    """
    for pause in (*PAUSES, None):
        try:
            return attempt()
        except FileNotFoundError as error:
            raise ShardError(f"{url} does not exist") from error
        except ImportError as error:
            raise ShardError(f"{url} needs a package: {error}") from error
        except Exception as error:  # each store has its own
            if pause is None:
                raise ShardError(f"{url} cannot be {done}: {str(error) or type(error).__name__}") from error
            time.sleep(pause)
    raise AssertionError("unreachable")


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
