"""Write files and folders so that a crash leaves the old version or the new one, and lock folders."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from covpool.errors import UsageError

if sys.platform != "win32":
    import fcntl

T = TypeVar("T")


def write_file(path: Path, data: bytes) -> None:
    """Write a new file, and return when it is on the disk."""
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk does not say which it is
        raise


def replace_file(path: str | Path, data: bytes) -> None:
    """Write a file, in place of one that may exist; whatever happens, one or the other is there, whole."""
    path = Path(os.path.realpath(path))
    saving = path.with_name(f".{path.name}.covpool-saving")
    with _lock(path.parent):
        try:
            saving.unlink(missing_ok=True)  # left by a process that was killed
            write_file(saving, data)
            os.replace(saving, path)
        finally:
            saving.unlink(missing_ok=True)
        sync_folder(path.parent)


@contextlib.contextmanager
def replace_folder(folder: str | Path) -> Iterator[Path]:
    """A new folder to fill by :func:`write_file`, which takes the place of ``folder`` at the end of ``with``.

    An exception leaves ``folder`` as it was. Of several processes that do this at once, the last wins.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     with replace_folder(f"{parent}/run") as new:
        ...         write_file(new / "note.txt", b"whole")
        ...     Path(parent, "run", "note.txt").read_bytes()
        b'whole'
    """
    folder = Path(os.path.realpath(folder))  # a link stays; what it leads to is replaced
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
    """``read`` of the folder, wherever a kill left it, and again if it failed while the folder was replaced.

    Args:
        folder: as given to :func:`replace_folder`.
        read: takes the folder where it is, and raises if two files in it do not belong together.
    """
    while True:
        path, identity = _where(Path(folder))
        try:
            return read(path)
        except Exception:
            if _where(Path(folder)) == (path, identity):
                raise


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on the disk."""
    if sys.platform == "win32":  # which has no such thing
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _previous(folder: Path) -> Path:
    """Where the old folder steps aside to."""
    return folder.with_name(f".{folder.name}.covpool-previous")


def _where(folder: Path) -> tuple[Path, tuple[int, int] | None]:
    """The folder, in its place or stepped aside, and what tells it from a later one."""
    previous = _previous(Path(os.path.realpath(folder)))
    path = folder if folder.exists() or not previous.exists() else previous
    try:
        status = path.stat()
    except OSError:
        return path, None
    return path, (status.st_ino, status.st_mtime_ns)  # the number alone may be given anew


def _swap(folder: Path, saving: Path) -> None:
    try:
        if folder.exists():
            shutil.copymode(folder, saving)  # what was private stays so
            os.rename(folder, _previous(folder))
        os.rename(saving, folder)
        sync_folder(folder.parent)
    finally:
        _put_back(folder)


def _put_back(folder: Path) -> None:
    """The old folder to its place if that is empty, and away if not."""
    previous = _previous(folder)
    if folder.exists():
        shutil.rmtree(previous, ignore_errors=True)
    elif previous.exists():
        os.rename(previous, folder)


def _clean_up(folder: Path) -> None:
    """What processes that were killed have left."""
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
        """Keep other processes out; the system opens the lock of a process that dies."""
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough if a forked child has it too
            os.close(descriptor)

    def _is_abandoned(folder: Path) -> bool:
        """Whether nobody holds its lock; where that cannot be known, it counts as held."""
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


# The name of the lock's file, which stays.
LOCK = ".covpool-lock"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other processes from writing into a folder, by a lock that dies with this process.

    The folder is made if it is not there. Processes that this one starts do not inherit the lock. Where there
    are no locks, as on Windows and on some file systems, nobody is kept out.

    Raises:
        ValueError: if another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "wb") as file:
        _lock_file(file.fileno(), folder)
        yield


def _lock_file(descriptor: int, folder: Path) -> None:
    if sys.platform == "win32":
        return
    try:
        # By fcntl, not flock: a worker that outlives a killed process must not keep its lock.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise UsageError(f"another process is writing into {folder}: let it finish") from error
    except OSError:  # a file system without locks
        return


def is_inside(path: str | Path, folder: str | Path) -> bool:
    """Whether a local path lies in a local folder, links followed; there need not be anything at the path.

    Example:
        >>> is_inside("rows", "."), is_inside("../rows", "."), is_inside(".", ".")
        (True, False, False)
    """
    return folder != "" and Path(folder).is_dir() and Path(folder).resolve() in Path(path).resolve().parents


def check_outside(path: str | Path, data: str | Path, what: str, option: str = "--out") -> None:
    """Raise if a path lies in the folder of the images.

    Args:
        path: where something is to be written.
        data: the images; a file or an address of a store holds nothing else.
        what: would be written, in the plural.
        option: of the path.
    """
    if is_inside(path, data):
        raise UsageError(f"{what} would go into the images themselves, as {path} is in {data}: give {option}")
