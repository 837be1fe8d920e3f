"""Read, write and hash single files, and write texts to CSV.

**Reading.** Only regular files are read, and only up to a limit that the caller states. A pipe, a device or a
socket raises an error, because reading it could block or never end. Links are followed.

**Writing.** A link never leads a write to another file. :func:`replace_file` replaces a link with the new
file. A file that is appended to, changed in place or locked must not be a link; it raises an error. The
folder of a file may be a link, for example ``runs``, which leads to another disk.

**CSV.** A spreadsheet runs a cell that starts with ``=``, ``+``, ``-``, ``@``, a tab or a carriage return.
Names of files and classes may come from others, so such a text gets an apostrophe in front. Reading removes
it.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import hashlib
import io
import json
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from covpool.errors import StorageError, TooLargeError

if sys.platform != "win32":
    import fcntl

# The largest text or JSON file: summaries, tables, logs and results. Names of 100,000 classes take 3 MB.
MAX_TEXT_BYTES = 1 << 28
# The largest file of weights or features.
MAX_WEIGHTS_BYTES = 1 << 44
# Present on Linux and macOS. A pipe that replaces a file after the check must not block.
_NONBLOCK, _NOFOLLOW = getattr(os, "O_NONBLOCK", 0), getattr(os, "O_NOFOLLOW", 0)
_BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_CHUNK_BYTES = 1 << 22


def open_regular(path: str | Path, limit: int | None = None) -> io.FileIO:
    """Open a regular file to read its bytes, without a buffer.

    Args:
        path: the file. Links are followed.
        limit: largest size in bytes. Without it, the caller reads only parts of known size.

    Raises:
        OSError: if it cannot be opened, or is a folder, a pipe, a device or a socket.
        TooLargeError: if it has more bytes.
    """
    _check(os.stat(path), path, limit)  # opening a device may already do something
    file = io.FileIO(_checked(os.open(path, os.O_RDONLY | _NONBLOCK | _BINARY), path, limit))
    if not os.fstat(file.fileno()).st_size and hasattr(os, "pread"):
        try:
            os.pread(
                file.fileno(), 1, 0
            )  # some files of the kernel have no size, and block when they are read
        except OSError as error:
            file.close()
            raise StorageError(f"{os.fspath(path)} cannot be read: {error.strerror}") from error
    return file


def check_regular(path: str | Path, limit: int) -> str:
    """Return the path of a regular file for a library that opens files itself.

    Raises:
        OSError: as :func:`open_regular`.
    """
    open_regular(path, limit).close()
    return os.fspath(path)


def read_file(path: str | Path, limit: int) -> bytes:
    """Return the bytes of a regular file; see :func:`open_regular`."""
    with open_regular(path, limit) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(size + 1)
        if len(data) == size:
            return data
        # The size is unknown, as in /proc, or the file grows.
        parts = [data]
        while part := file.read(min(_CHUNK_BYTES, limit + 1)):
            parts.append(part)
            if sum(map(len, parts)) > limit:
                raise _too_large(path, limit)
        return b"".join(parts)


def read_text(path: str | Path, limit: int = MAX_TEXT_BYTES, errors: str = "strict") -> str:
    """Return the text of a regular file in UTF-8."""
    return read_file(path, limit).decode("utf-8", errors)


def read_json(path: str | Path, limit: int = MAX_TEXT_BYTES) -> Any:
    """Return the content of a JSON file.

    Raises:
        OSError: as :func:`open_regular`.
        ValueError: if it is not JSON.
    """
    try:
        return json.loads(read_file(path, limit))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error


def json_bytes(value: Any) -> bytes:
    """Return the content of a JSON file, for :func:`replace_file`. A name may hold bytes that are no text."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def package_text(package: str, *names: str) -> str:
    """Return a text file that is part of covpool; nothing if it is not there."""
    file = resources.files(package).joinpath(*names)
    return file.read_text("utf-8") if file.is_file() else ""


def _check(status: os.stat_result, path: str | Path, limit: int | None) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file, but a pipe, a device or a socket", os.fspath(path))
    if limit is not None and status.st_size > limit:
        raise _too_large(path, limit)


def _checked(descriptor: int, path: str | Path, limit: int | None = None) -> int:
    """Return the descriptor of a regular file; close another one and raise."""
    try:
        _check(os.fstat(descriptor), path, limit)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _too_large(path: str | Path, limit: int) -> TooLargeError:
    return TooLargeError(f"{os.fspath(path)} has more than {limit:,} bytes, the limit for this kind of file")


def open_own(path: str | Path, flags: int) -> io.FileIO:
    """Open a file of covpool for writing or locking.

    Args:
        path: the file, which must not be a link.
        flags: such as ``os.O_RDWR | os.O_CREAT``.

    Raises:
        StorageError: if it is a link.
        OSError: if it is not a regular file, or cannot be opened.
    """
    if not _NOFOLLOW and os.path.islink(path):  # Windows
        raise _is_link(path)
    try:
        descriptor = os.open(path, flags | _NOFOLLOW | _NONBLOCK | _BINARY, 0o666)
    except OSError as error:
        if os.path.islink(path):
            raise _is_link(path) from error
        raise
    mode = "rb+" if flags & os.O_RDWR else "ab" if flags & os.O_APPEND else "wb"
    return io.FileIO(_checked(descriptor, path), mode if flags & (os.O_RDWR | os.O_WRONLY) else "rb")


def _is_link(path: str | Path) -> StorageError:
    return StorageError(f"{os.fspath(path)} is a link, and covpool does not write through links: remove it")


def create_file(path: str | Path) -> io.FileIO:
    """Create a new file to write and read.

    Raises:
        FileExistsError: if there is a file or a link of this name.
    """
    return open_own(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)


def update_file(path: str | Path) -> io.FileIO:
    """Open a file to change it in place."""
    return open_own(path, os.O_RDWR)


def append_file(path: str | Path, data: bytes) -> None:
    """Add bytes to the end of a file, which need not exist."""
    with open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as file:
        _write_all(file, data)


def write_file(path: str | Path, data: bytes) -> None:
    """Write a new file, and return once it is on the disk."""
    try:
        with create_file(path) as file:
            _write_all(file, data)
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)  # the error of a full disk has no file name
        raise


def _write_all(file: io.FileIO, data: bytes) -> None:
    left = memoryview(data)
    while left:  # at most 2 GiB at a time
        left = left[file.write(left) :]


def replace_file(path: str | Path, data: bytes) -> None:
    """Write or replace a file; after a crash, either the old or the new version is there, complete."""
    path = Path(path)
    saving = path.with_name(f".{path.name}.covpool-saving")
    with lock_folder(path.parent):
        try:
            saving.unlink(missing_ok=True)  # left by a killed process
            write_file(saving, data)
            os.replace(saving, path)
        finally:
            saving.unlink(missing_ok=True)
        sync_folder(path.parent)


def rename_file(path: str | Path, new: str | Path) -> None:
    """Give a complete file its final name, which replaces the file or link of that name."""
    os.replace(path, new)


def mark_file(path: str | Path) -> None:
    """Create an empty file if there is none."""
    open_own(path, os.O_RDWR | os.O_CREAT).close()


def sync_folder(folder: str | Path) -> None:
    """Return once the file names in a folder are on the disk."""
    if sys.platform == "win32":  # has no such call
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


if sys.platform == "win32":

    @contextlib.contextmanager
    def lock_folder(folder: Path) -> Iterator[None]:
        """Do nothing."""
        yield

else:

    @contextlib.contextmanager
    def lock_folder(folder: Path) -> Iterator[None]:
        """Keep others from replacing files in a folder; the system releases the lock of a dead process."""
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may keep the file open
            os.close(descriptor)


# A SHA-256 that grows with ``update``.
Digest = hashlib.sha256


def digest(data: bytes | str) -> str:
    """Return the SHA-256 of bytes, or of text in UTF-8.

    Example:
        >>> digest("wren")[:16]
        'b1e3c2ec1a80a8cc'
    """
    text = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data
    return hashlib.sha256(text).hexdigest()


def digest_file(file: str | Path | io.FileIO, start: int = 0, stop: int | None = None) -> str:
    """Return the SHA-256 of a regular file or of a range of its bytes, read in pieces."""
    if not isinstance(file, io.FileIO):
        with open_regular(file) as opened:
            return digest_file(opened, start, stop)
    digest = hashlib.sha256()
    left = os.fstat(file.fileno()).st_size - start if stop is None else stop - start
    file.seek(start)
    while left > 0 and (data := file.read(min(left, _CHUNK_BYTES))):
        digest.update(data)
        left -= len(data)
    return digest.hexdigest()


def digest_number(text: str, bits: int = 64) -> int:
    """Return an integer that depends on a text alone, spread evenly over ``bits`` bits."""
    data = text.encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(data, digest_size=bits // 8).digest(), "little")


# Patterns of Python and of Arrow. A text that starts with apostrophes gets one more, so both are exact.
FORMULA, WRITTEN = "^('*[=+\\-@\t\r])", "^'('*[=+\\-@\t\r])"
_FORMULA, _WRITTEN = re.compile(FORMULA), re.compile(WRITTEN)


def to_cell(value: object) -> object:
    """Return a value as it is written to CSV; numbers stay as they are.

    Example:
        >>> [to_cell(one) for one in ("=1+1", "wren", "'tis", "'=1", -0.5)]
        ["'=1+1", 'wren', "'tis", "''=1", -0.5]
    """
    return _FORMULA.sub(r"'\1", value) if isinstance(value, str) else value


def from_cell(text: str) -> str:
    """Return the text that :func:`to_cell` wrote.

    Example:
        >>> [from_cell(one) for one in ("'=1+1", "wren", "'tis", "''=1")]
        ['=1+1', 'wren', "'tis", "'=1"]
    """
    return _WRITTEN.sub(r"\1", text)


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Return rows as CSV.

    Example:
        >>> csv_text([["name", "loss"], ["a,b", -0.5], ["=1", 0]]).splitlines()
        ['name,loss', '"a,b",-0.5', "'=1,0"]
    """
    lines = _Lines()
    # With this end of a line, Python quotes carriage returns too: they end a row in a spreadsheet.
    csv.writer(lines, lineterminator="\r\n").writerows(map(to_cell, row) for row in rows)
    return "".join(lines)


class _Lines(list[str]):
    """Receives each row with its end, and ends it as on Linux."""

    def write(self, row: str) -> None:
        self.append(row.removesuffix("\r\n") + "\n")
