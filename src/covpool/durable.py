"""Write files and folders so that a crash leaves either the old or the new version, and lock folders.

:func:`open_regular` opens what was written by others: a pipe or a device would never end.

There are two kinds of locks, because neither does the other's work:

- :func:`replace_file` and :func:`replace_folder` lock the parent folder itself with ``flock``, for a moment.
  That leaves no lock file behind, and also keeps threads of one process apart.
- :func:`held` locks a file in the folder with ``lockf``, for as long as a command runs. Worker processes do
  not inherit this lock, so a worker that outlives a killed command does not keep it.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from covpool.errors import UsageError

if sys.platform != "win32":
    import fcntl

T = TypeVar("T")


def open_regular(path: str | Path) -> io.FileIO:
    """Open a regular file to read its bytes, without a buffer. Links are followed.

    Raises:
        OSError: if it cannot be opened, or is a folder, a pipe, a device or a socket.
    """
    _check_regular(os.stat(path), path)  # opening a device may already do something
    # A pipe that takes the place of the file after the check must not block.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    try:
        _check_regular(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return io.FileIO(descriptor)


def _check_regular(status: os.stat_result, path: str | Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file, but a pipe, a device or a socket", os.fspath(path))


def read_regular(path: str | Path) -> bytes:
    """Return the bytes of a regular file; see :func:`open_regular`."""
    with open_regular(path) as file:
        return file.readall()


def write_file(path: Path, data: bytes) -> None:
    """Write a new file, and return once it is on the disk."""
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)  # the error of a full disk has no file name
        raise


def replace_file(path: str | Path, data: bytes) -> None:
    """Write or replace a file; after a crash, either the old or the new version is there, complete."""
    path = Path(os.path.realpath(path))
    saving = path.with_name(f".{path.name}.covpool-saving")
    with _lock(path.parent):
        try:
            saving.unlink(missing_ok=True)  # left by a killed process
            write_file(saving, data)
            os.replace(saving, path)
        finally:
            saving.unlink(missing_ok=True)
        sync_folder(path.parent)


@contextlib.contextmanager
def replace_folder(folder: str | Path) -> Iterator[Path]:
    """Give a new folder to fill with :func:`write_file`; it replaces ``folder`` at the end of ``with``.

    An exception leaves ``folder`` as it was. If several processes do this at once, the last one wins.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     with replace_folder(f"{parent}/run") as new:
        ...         write_file(new / "note.txt", b"whole")
        ...     Path(parent, "run", "note.txt").read_bytes()
        b'whole'
    """
    folder = Path(os.path.realpath(folder))  # a link stays a link; its target is replaced
    folder.parent.mkdir(parents=True, exist_ok=True)
    saving = folder.with_name(f".{folder.name}.covpool-saving-{secrets.token_hex(4)}")
    with contextlib.ExitStack() as held:
        with _lock(folder.parent):
            _clean_up(folder)
            saving.mkdir()
            held.enter_context(_lock(saving))
        try:
            yield saving
            sync_folder(saving)
            with _lock(folder.parent):
                _swap(folder, saving)
        finally:
            shutil.rmtree(saving, ignore_errors=True)


def read_folder(folder: str | Path, read: Callable[[Path], T]) -> T:
    """Read a folder that :func:`replace_folder` writes, even after a crash or during a replacement.

    Args:
        folder: as given to :func:`replace_folder`.
        read: reads the folder at the path it receives, and raises if its files do not belong together. It is
            called again if the folder was replaced meanwhile.
    """
    while True:
        path, identity = _where(Path(folder))
        try:
            return read(path)
        except Exception:
            if _where(Path(folder)) == (path, identity):
                raise


def sync_folder(folder: Path) -> None:
    """Return once the file names in a folder are on the disk."""
    if sys.platform == "win32":  # has no such call
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _previous(folder: Path) -> Path:
    """Return the temporary name of the old folder during a replacement."""
    return folder.with_name(f".{folder.name}.covpool-previous")


def _where(folder: Path) -> tuple[Path, tuple[int, int] | None]:
    """Return the current path of the folder, and an identity that changes when it is replaced."""
    previous = _previous(Path(os.path.realpath(folder)))
    path = folder if folder.exists() or not previous.exists() else previous
    try:
        status = path.stat()
    except OSError:
        return path, None
    return path, (status.st_ino, status.st_mtime_ns)  # an inode number may be reused


def _swap(folder: Path, saving: Path) -> None:
    try:
        if folder.exists():
            shutil.copymode(folder, saving)  # a private folder stays private
            os.rename(folder, _previous(folder))
        os.rename(saving, folder)
        sync_folder(folder.parent)
    finally:
        _put_back(folder)


def _put_back(folder: Path) -> None:
    """Restore the old folder if the new one is missing; delete it otherwise."""
    previous = _previous(folder)
    if folder.exists():
        shutil.rmtree(previous, ignore_errors=True)
    elif previous.exists():
        os.rename(previous, folder)


def _clean_up(folder: Path) -> None:
    """Remove the leftovers of killed processes."""
    _put_back(folder)
    prefix = f".{folder.name}.covpool-saving-"
    for path in folder.parent.iterdir():
        if path.name.startswith(prefix) and path.is_dir() and _is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)


if sys.platform == "win32":

    @contextlib.contextmanager
    def _lock(folder: Path) -> Iterator[None]:
        yield

    def _is_abandoned(folder: Path) -> bool:
        return False

else:

    @contextlib.contextmanager
    def _lock(folder: Path) -> Iterator[None]:
        """Keep others out; the system releases the lock of a process that dies."""
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may keep the file open
            os.close(descriptor)

    def _is_abandoned(folder: Path) -> bool:
        """Return whether nobody holds the lock of a folder; if that is unknown, return false."""
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True


# The lock file of `held`, which is never deleted.
LOCK = ".covpool-lock"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other processes from writing into a folder until this one leaves ``with`` or dies.

    The folder is created if it does not exist. Windows and some file systems have no such locks; there this
    does nothing.

    Raises:
        UsageError: if another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "wb") as file:
        if sys.platform != "win32":
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:
                raise UsageError(f"another process is writing into {folder}: let it finish") from error
            except OSError:  # a file system without locks
                pass
        yield


def is_inside(path: str | Path, folder: str | Path) -> bool:
    """Return whether a local path lies in a local folder, with links resolved; the path need not exist.

    Example:
        >>> is_inside("rows", "."), is_inside("../rows", "."), is_inside(".", ".")
        (True, False, False)
    """
    return folder != "" and Path(folder).is_dir() and Path(folder).resolve() in Path(path).resolve().parents


def check_outside(path: str | Path, data: str | Path, what: str, option: str = "--out") -> None:
    """Raise if a path to write to lies in the folder of the images.

    Args:
        path: the path to write to.
        data: the images: a folder, a file or a remote URL.
        what: name of the output, in the plural.
        option: the option that sets the path.
    """
    if is_inside(path, data):
        raise UsageError(f"{what} would go into the images themselves, as {path} is in {data}: give {option}")
