"""Replace folders so that a crash leaves the old or the new version, and lock folders.

There are two kinds of locks, because neither does the other's work:

- :func:`covpool.storage.files.replace_file` and :func:`replace_folder` lock the parent folder itself with
  ``flock``, for a moment. That leaves no lock file behind, and also keeps threads of one process apart.
- :func:`held` locks a file in the folder with ``lockf``, for as long as a command runs. Worker processes do
  not inherit this lock, so a worker that outlives a killed command does not keep it.

As for files, a link never leads a write elsewhere: :func:`replace_folder` replaces a link with the new
folder. A folder that the user names may be a link; pass it through :func:`resolved` first.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from covpool.errors import StorageError, UsageError
from covpool.storage.files import lock_folder, open_own, sync_folder

if sys.platform != "win32":
    import fcntl

T = TypeVar("T")


def resolved(folder: str | Path) -> Path:
    """Return the path of a folder without links. The user may name an output folder through a link."""
    return Path(os.path.realpath(folder))


@contextlib.contextmanager
def replace_folder(folder: str | Path) -> Iterator[Path]:
    """Give a new folder to fill with ``write_file``; it replaces ``folder`` at the end of ``with``.

    An exception leaves ``folder`` as it was. If several processes do this at once, the last one wins.

    Example:
        >>> from covpool.storage.files import read_file, write_file
        >>> with scratch_folder() as parent:
        ...     with replace_folder(parent / "run") as new:
        ...         write_file(new / "note.txt", b"whole")
        ...     read_file(parent / "run" / "note.txt", 100)
        b'whole'
    """
    folder = Path(folder).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    saving = folder.with_name(f".{folder.name}.covpool-saving-{secrets.token_hex(4)}")
    with contextlib.ExitStack() as stack:
        with lock_folder(folder.parent):
            _clean_up(folder)
            saving.mkdir()
            stack.enter_context(lock_folder(saving))
        try:
            yield saving
            sync_folder(saving)
            with lock_folder(folder.parent):
                _swap(folder, saving)
        finally:
            remove_folder(saving)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Give a new folder to fill, also with ``replace_file``; it takes the name of ``folder`` at the end.

    Raises:
        UsageError: if ``folder`` exists and is not empty.
    """
    check_new(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    saving = folder.with_name(f".{folder.name}.covpool-saving-{secrets.token_hex(4)}")
    saving.mkdir()
    try:
        yield saving
        os.replace(saving, folder)
    finally:
        remove_folder(saving)


def check_new(folder: Path) -> None:
    """Raise if an output folder exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists: use a new folder")


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


def make_folder(folder: Path) -> Path:
    """Make a folder inside an output folder; it may exist.

    Raises:
        StorageError: if it is a link, which would lead the files in it elsewhere.
    """
    if folder.is_symlink():
        raise StorageError(f"{folder} is a link, and covpool does not write through links: remove it")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def rename_folder(folder: Path, new: Path) -> None:
    """Rename a folder; it replaces a folder or link of that name."""
    remove_folder(new)
    os.rename(folder, new)


def remove(path: Path) -> None:
    """Remove a file or a folder; of a link, the link alone."""
    if path.is_dir() and not path.is_symlink():
        remove_folder(path)
    else:
        path.unlink(missing_ok=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder with its files, as far as possible; of a link, the link alone."""
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def scratch_folder(parent: Path | None = None, prefix: str = "covpool-") -> Iterator[Path]:
    """Give an empty folder that is removed at the end of ``with``; by default where temporary files are."""
    with tempfile.TemporaryDirectory(dir=parent, prefix=prefix) as folder:
        yield Path(folder)


def _previous(folder: Path) -> Path:
    """Return the temporary name of the old folder during a replacement."""
    return folder.with_name(f".{folder.name}.covpool-previous")


def _where(folder: Path) -> tuple[Path, tuple[int, int] | None]:
    """Return the current path of the folder, and an identity that changes when it is replaced."""
    previous = _previous(resolved(folder))
    path = folder if folder.exists() or not previous.exists() else previous
    try:
        status = path.stat()
    except OSError:
        return path, None
    return path, (status.st_ino, status.st_mtime_ns)  # an inode number may be reused


def _swap(folder: Path, saving: Path) -> None:
    try:
        if os.path.lexists(folder):
            if not folder.is_symlink():
                shutil.copymode(folder, saving)  # a private folder stays private
            os.rename(folder, _previous(folder))
        os.rename(saving, folder)
        sync_folder(folder.parent)
    finally:
        _put_back(folder)


def _put_back(folder: Path) -> None:
    """Restore the old folder if the new one is missing; delete it otherwise."""
    previous = _previous(folder)
    if os.path.lexists(folder):
        remove_folder(previous)
    elif os.path.lexists(previous):
        os.rename(previous, folder)


def clean_up(folder: Path) -> None:
    """Remove what killed processes left beside a folder, such as its old version."""
    with lock_folder(folder.parent):
        _clean_up(folder)


def _clean_up(folder: Path) -> None:
    _put_back(folder)
    prefix = f".{folder.name}.covpool-saving-"
    for path in folder.parent.iterdir():
        if path.name.startswith(prefix) and path.is_dir() and _is_abandoned(path):
            remove_folder(path)


if sys.platform == "win32":

    def _is_abandoned(folder: Path) -> bool:
        return False

else:

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
        StorageError: if the lock file is a link.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open_own(folder / LOCK, os.O_RDWR | os.O_CREAT) as file:
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
