"""List and read files by path or URL, on disk or in object storage, and classify their errors."""

from __future__ import annotations

import errno
import functools
import hashlib
import logging
import os
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from covpool.data.decode import FORMAT_OF, NOT_READ
from covpool.data.image_set import BaseSet, Names, read_file
from covpool.data.shards.remote import patiently
from covpool.errors import BadImageError, ShardError, StorageError, UsageError
from covpool.terminal import counted

LOGGER = logging.getLogger("covpool")

# Errors of the machine or the network: the next image would fail too, and later none would.
PASSING = {
    getattr(errno, name)
    for name in ("EMFILE", "ENFILE", "ENOMEM", "ESTALE", "ENOTCONN", "ETIMEDOUT", "EHOSTDOWN", "EHOSTUNREACH")
    if hasattr(errno, name)
}


def is_passing(error: OSError) -> bool:
    """Return whether an error is not about the file."""
    return error.errno in PASSING


def was_taken_off(path: str | Path, error: OSError) -> bool:
    """Return whether a file is gone together with its whole folder, for example after an unmount."""
    if not isinstance(error, FileNotFoundError):
        return False
    try:
        with os.scandir(os.path.dirname(path)) as entries:
            return next(entries, None) is None
    except OSError:
        return True


def cannot_go_on(what: object, error: OSError) -> ShardError:
    """Return the error that stops a job; rerun the command to resume."""
    return ShardError(f"the input cannot be read any more: {what}: {error.strerror or error}")


# HTTP status codes that are about one file and will not change.
ABOUT_A_FILE = (400, 403, 404, 405, 406, 410, 414, 415, 451)
# Seconds before a folder in object storage is listed again: a listing may take many requests.
TRUSTED = 60.0
_listed: dict[str, float] = {}


@dataclass(frozen=True)
class Address:
    """A file or a folder.

    Attributes:
        url: the URL for fsspec; for a local file, its path.
        path: its path in its file system.
        is_local: whether it is on a local disk.
    """

    url: str
    path: str
    is_local: bool

    @classmethod
    def of(cls, text: str | Path) -> Address:
        """Return the address of a path or URL.

        Raises:
            UsageError: if fsspec cannot open such URLs.
        """
        import fsspec  # here, because the import takes a while
        from fsspec.implementations.local import LocalFileSystem

        try:
            store, path = fsspec.core.url_to_fs(os.fspath(text))
        except (ImportError, ValueError) as error:
            raise UsageError(f"{text} cannot be opened: {error}") from error
        is_local = isinstance(store, LocalFileSystem)
        return cls(path if is_local else os.fspath(text).rstrip("/"), path.rstrip("/") or "/", is_local)

    @property
    def store(self) -> Any:
        """Its file system, made for each use: one that was made before a fork can wait forever."""
        import fsspec

        return fsspec.core.url_to_fs(self.url)[0]

    @property
    def name(self) -> str:
        """The last part of the path."""
        return PurePosixPath(self.path).name

    @property
    def parent(self) -> Address:
        """The folder that holds it."""
        path = str(PurePosixPath(self.path).parent)
        return Address(path if self.is_local else self.url.rpartition("/")[0], path, self.is_local)

    def below(self, name: str) -> Address:
        """Return the address of a name in the folder, or of the name alone if it is absolute."""
        if "://" in name or (self.is_local and os.path.isabs(name)):
            return Address.of(name)
        path = f"{self.path.rstrip('/')}/{name}"
        return Address(path if self.is_local else f"{self.url}/{name}", path, self.is_local)

    def read_listed(self, name: str) -> bytes:
        """Return the bytes of a file that a table in the folder lists.

        Raises:
            BadImageError: if its path or URL is not valid.
            OSError: if it cannot be read.
            ShardError: if object storage does not answer, a package is missing, or nothing can be read.
        """
        try:
            where = self.below(name)
        except ValueError as error:
            if isinstance(error.__cause__, ImportError):  # once installed, all such rows can be read
                raise ShardError(str(error)) from error
            raise BadImageError("unreadable", str(error)) from error
        try:
            return where.read()
        except (ShardError, BadImageError):
            raise
        except ValueError as error:  # no file can have this name
            raise BadImageError("unreadable", str(error)) from error
        except OSError as error:
            is_refused = not where.is_local and isinstance(error, PermissionError)
            if is_passing(error) or (is_refused and where.parent._refuses()):
                raise cannot_go_on(where.url, error) from error
            raise

    def _refuses(self) -> bool:
        """Return whether object storage does not list the folder, for example because a key has expired."""
        if time.monotonic() - _listed.get(self.url, -TRUSTED) < TRUSTED:
            return False
        try:
            store = self.store
            store.invalidate_cache()
            store.ls(self.path, detail=False)
        except Exception:  # each store has its own
            return True
        _listed[self.url] = time.monotonic()
        return False

    def is_folder(self) -> bool:
        """Return whether it is a folder.

        Raises:
            FileNotFoundError: if it does not exist.
            OSError: if object storage does not answer.
        """
        if self.is_local:
            os.stat(self.path)
            return os.path.isdir(self.path)
        store = self.store
        try:
            is_folder = bool(store.isdir(self.path))
            is_there = is_folder or store.exists(self.path)
        except OSError as error:
            raise StorageError(f"{self.url} cannot be reached: {error}") from error
        if not is_there:
            raise FileNotFoundError(f"{self.url} does not exist")
        return is_folder

    def read(self) -> bytes:
        """Return the bytes of a file; requests to object storage are repeated if they fail.

        Raises:
            OSError: if this file cannot be read.
            ShardError: if object storage does not answer.
        """
        if self.is_local:
            return read_file(self.path)

        def attempt() -> bytes | OSError:
            try:
                data: bytes = self.store.cat_file(self.path)
                return data
            except FileNotFoundError:
                return FileNotFoundError("the file does not exist")
            except PermissionError as error:
                return PermissionError(f"the store does not give it: {error}")
            except Exception as error:
                status = getattr(error, "status", None)  # of HTTP
                if status in ABOUT_A_FILE:
                    return OSError(f"the server answers {status}")
                raise

        found = patiently(self.url, attempt)
        if isinstance(found, OSError):
            raise found
        return found

    def open(self) -> Any:
        """Open the file, to read parts of it."""
        return open(self.path, "rb") if self.is_local else self.store.open(self.path, "rb")

    def files(self, wanted: Callable[[str], bool]) -> list[str]:
        """Return the names of the wanted files in the folder and below, in order."""
        if self.is_local:
            return list(files_under(Path(self.path), wanted))
        found = (path[len(self.path) :].lstrip("/") for path in self.store.find(self.path))
        return sorted(name for name in found if all(map(is_visible, name.split("/"))) and wanted(name))


def subfolders(path: Path) -> list[str]:
    """Return the names of the visible folders in a folder."""
    with os.scandir(path) as entries:
        return sorted(entry.name for entry in entries if is_visible(entry.name) and _is_folder(entry))


def is_visible(name: str) -> bool:
    """Return whether a file or folder is neither hidden nor added by macOS."""
    return not name.startswith(".") and name != "__MACOSX"


def is_image(name: str) -> bool:
    """Return whether a file has the extension of an image."""
    return os.path.splitext(name)[1].lower() in FORMAT_OF


class ImageNames:
    """Tells names of images from others, and counts the pictures among the others.

    Attributes:
        not_read: the number of pictures that are not read, by extension.
    """

    def __init__(self) -> None:
        self.not_read: Counter[str] = Counter()

    def __call__(self, name: str) -> bool:
        """Return whether a file has the extension of an image that is read."""
        extension = os.path.splitext(name)[1].lower()
        if extension in NOT_READ:
            self.not_read[extension] += 1
        return extension in FORMAT_OF

    def warn(self, path: object) -> None:
        """Log the pictures that are not read, with advice."""
        if self.not_read:
            kinds = self.not_read.most_common()
            listed = "; ".join(f"{count:,} {extension}, {NOT_READ[extension]}" for extension, count in kinds)
            total = counted(self.not_read.total(), "picture")
            _warn_once(f"{path}: {total} left out, in formats that are not read: {listed}")


@functools.lru_cache(maxsize=1000)
def _warn_once(message: str) -> None:
    """Log a warning; a command that opens the same images several times logs it once."""
    LOGGER.warning(message)


def files_under(
    root: Path, wanted: Callable[[str], bool], folder: str = "", above: tuple[tuple[int, int], ...] = ()
) -> Iterator[str]:
    """Yield the files in a folder and below, in order, as paths relative to ``root``.

    Args:
        root: the folder that paths start from.
        wanted: returns whether to yield a file of this name.
        folder: the folder to list, relative to ``root``.
        above: device and inode of the folders on the way to it.
    """
    path = os.path.join(root, folder)
    status = os.stat(path)
    identity = status.st_dev, status.st_ino
    if identity in above:
        raise UsageError(f"{path} is a link back to a folder above it: remove it")
    files, folders = [], []
    with os.scandir(path) as entries:
        for entry in entries:
            if not is_visible(entry.name):
                continue
            # The kind comes with the name, so only links are queried. Reading reports a broken link.
            if _is_folder(entry):
                folders.append(entry.name)
            elif wanted(entry.name) and (entry.is_symlink() or entry.is_file()):
                files.append(entry.name)
    start = f"{folder}/" if folder else ""
    for name in sorted(files, key=composed):
        yield f"{start}{name}"
    for name in sorted(folders, key=composed):
        yield from files_under(root, wanted, f"{start}{name}", (*above, identity))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def composed(name: str) -> str:
    """Return a name with é as one letter; macOS may store an e and an accent."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


class FileImages(BaseSet):
    """Unlabeled images in files, on disk or in object storage.

    Args:
        root: the folder that names start from.
        names: of the files. Sizes and dates of local files are read at once.
    """

    classes: tuple[str, ...] = ()
    labels = None

    def __init__(self, root: Address, names: Iterable[str]) -> None:
        self.root, self.names = root, Names(names)
        self._stamp, self._absent = self._look()

    def __len__(self) -> int:
        return len(self.names)

    def name(self, i: int) -> str:
        """Return the path from the folder."""
        return self.names[i]

    def read(self, i: int) -> bytes:
        """Return the bytes of a file."""
        try:
            return self.root.read_listed(self.names[i])
        except OSError as error:
            was_there = self.root.is_local and i not in self._absent
            path = os.path.join(self.root.path, self.names[i])
            if was_there and was_taken_off(path, error):
                raise cannot_go_on(path, error) from error
            raise

    def stamp(self) -> str:
        """Return a hash of names, sizes and dates; in object storage, of names and the folder's URL."""
        return self._stamp

    def _look(self) -> tuple[str, frozenset[int]]:
        """Return the stamp, and the numbers of the local files that do not exist now."""
        digest, absent = hashlib.sha256(bytes(self.names.joined) + self.names.ends.tobytes()), []
        if not self.root.is_local:
            digest.update(self.root.url.encode())
            return digest.hexdigest(), frozenset()
        for i, name in enumerate(self.names):
            try:
                status = os.stat(os.path.join(self.root.path, name))
                digest.update(f"{status.st_size},{status.st_mtime_ns};".encode())
            except (OSError, ValueError):  # also for a URL in a list
                digest.update(b"-")
                absent.append(i)
        return digest.hexdigest(), frozenset(absent)
