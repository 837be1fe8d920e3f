"""A folder of files that were downloaded from object storage.

A file is downloaded under a temporary name and renamed once it is complete. A process locks a file (flock)
exclusively while it downloads it, and shared while it reads it; locked files are never removed. The file
opened longest ago is removed first. If all are locked, the folder grows over its limit.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import fsspec

from covpool.errors import BadImageError, ShardError
from covpool.storage.address import HTTP, open_store
from covpool.storage.files import digest, open_own
from covpool.storage.remote import MAX_BODY_BYTES, SLOWEST, current, patiently

if sys.platform != "win32":
    import fcntl

# File extensions in the cache: complete files, and downloads in progress.
WHOLE, PART = ".covpool-shard", ".covpool-part"
# How often a process checks whether another process's download is complete. A download takes seconds.
POLL_SECONDS = 0.02


class FileCache:
    """A folder of downloaded files.

    Args:
        folder: created if it does not exist. Other files in it are left alone.
        limit: maximum total size of the cached files, in bytes.
    """

    def __init__(self, folder: str | Path, limit: int) -> None:
        if sys.platform == "win32":
            raise ShardError("remote shards need file locks that Windows lacks: copy them to a local disk")
        self.folder, self.limit = Path(folder), limit
        self.folder.mkdir(parents=True, exist_ok=True)

    def opened(self, url: str, version: str, size: int | None = None) -> int:
        """Download a file unless it is cached, and open it.

        Args:
            url: fsspec URL of the file.
            version: identifies the file's contents; a new version is downloaded again.
            size: expected size in bytes, if known; a file of another size is refused.

        Returns:
            A file descriptor to read from. Closing it allows the file to be removed.
        """
        name = digest(f"{url}\n{version}")[:32]
        try:
            return self._open(self.folder / f"{name}{WHOLE}", self.folder / f"{name}{PART}", url, size)
        except OSError as error:  # of the cache folder; remote errors are ShardErrors already
            raise ShardError(f"the cache in {self.folder} cannot be used: {error}") from error

    def _open(self, path: Path, part: Path, url: str, size: int | None) -> int:
        while True:
            descriptor = _hold(path, os.O_RDONLY, fcntl.LOCK_SH)
            if descriptor is not None:
                os.utime(descriptor)
                return descriptor
            self.folder.mkdir(parents=True, exist_ok=True)  # it may have been deleted meanwhile
            holding = _hold(part, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if holding is None:
                time.sleep(POLL_SECONDS)
                continue
            try:
                if path.exists():  # another process downloaded it first
                    part.unlink()
                else:
                    self._make_room(size or 0)
                    _download(url, part, size)
                    os.replace(part, path)
                    self._make_room(0)  # count files that other processes downloaded meanwhile
            except BaseException:
                part.unlink(missing_ok=True)
                raise
            finally:
                os.close(holding)

    def _make_room(self, size: int) -> None:
        """Remove the least recently opened files until ``size`` more bytes fit."""
        files = []
        for path in self.folder.iterdir():
            if path.suffix not in (WHOLE, PART):
                continue
            try:
                status = path.stat()
            except FileNotFoundError:  # another process removed it
                continue
            files.append((status.st_mtime_ns, status.st_size, path))
        total = size + sum(length for _, length, _ in files)
        for _, length, path in sorted(files):
            if total <= self.limit:
                return
            descriptor = _hold(path, os.O_RDONLY, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if descriptor is not None:
                path.unlink()
                os.close(descriptor)
                total -= length


def _hold(path: Path, flags: int, lock: int) -> int | None:
    """Open and lock a file; return ``None`` if it does not exist or another process holds the lock."""
    while True:
        try:
            file = open_own(path, flags)
        except FileNotFoundError:
            return None
        descriptor = os.dup(file.fileno())
        file.close()
        is_ours = False
        try:
            fcntl.flock(descriptor, lock)
            # The file may have been removed or renamed between opening and locking.
            with contextlib.suppress(FileNotFoundError):
                is_ours = path.stat().st_ino == os.fstat(descriptor).st_ino
        except BlockingIOError:
            return None
        finally:
            if not is_ours:
                os.close(descriptor)
        if is_ours:
            return descriptor


class _Limit(fsspec.Callback):  # type: ignore[misc]  # fsspec has no types
    """Stops a download that sends more bytes than it should; it would fill the disk."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def relative_update(self, inc: int = 1) -> None:
        super().relative_update(inc)
        if self.value > self.limit:
            raise BadImageError("too large", f"it has more than the {self.limit:,} bytes that are expected")


def _download(url: str, path: Path, size: int | None) -> None:
    """Download to a file; retry if the size is wrong, because a connection can end early."""
    limit = MAX_BODY_BYTES if size is None else size
    # With all retries; a file of unknown size has the time of a table.
    seconds = max(current().table_timeout, (size or 0) / SLOWEST) if url.startswith(HTTP) else float("inf")
    until = time.monotonic() + seconds

    def attempt() -> None:
        # Created for each download: a file system inherited through a fork can hang.
        store, remote = open_store(url)
        try:
            if url.startswith(HTTP):
                from covpool.storage.http import download

                download(store, url, path, until, _Limit(limit))
            else:
                store.get_file(remote, str(path), callback=_Limit(limit))
        except BadImageError as error:
            raise ShardError(f"{url} cannot be read: {error}") from error
        length = path.stat().st_size
        if size is not None and length != size:
            raise ShardError(f"it has {length:,} bytes, but the index lists {size:,}")

    patiently(url, attempt, until=until)
