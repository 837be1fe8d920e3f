"""Open files by path or URL, on disk or in object storage, and tell passing errors from lasting ones."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from covpool.data.image_set import read_file
from covpool.data.shards.remote import patiently
from covpool.data.sources.folder import files_under, is_visible
from covpool.errors import BadImageError, ShardError, StorageError, UsageError

# Of the machine or of the network: the next image would fail too, and none of them later.
PASSING = {
    getattr(errno, name)
    for name in ("EMFILE", "ENFILE", "ENOMEM", "ESTALE", "ENOTCONN", "ETIMEDOUT", "EHOSTDOWN", "EHOSTUNREACH")
    if hasattr(errno, name)
}


def is_passing(error: OSError) -> bool:
    """Whether an error says nothing of the file."""
    return error.errno in PASSING


def was_taken_off(path: str | Path, error: OSError) -> bool:
    """Whether a file that was there is gone with all that lay beside it, as when a disk was taken off."""
    if not isinstance(error, FileNotFoundError):
        return False
    try:
        with os.scandir(os.path.dirname(path)) as entries:
            return next(entries, None) is None
    except OSError:
        return True


def cannot_go_on(what: object, error: OSError) -> ShardError:
    """What ends the job, which goes on from there when it is given again."""
    return ShardError(f"the input cannot be read any more: {what}: {error.strerror or error}")


# Answers of a server that are about one file, and will be the same tomorrow.
ABOUT_A_FILE = (400, 403, 404, 405, 406, 410, 414, 415, 451)
# Seconds for which a store that has listed a folder is not asked again: it may take many requests.
TRUSTED = 60.0
_listed: dict[str, float] = {}


@dataclass(frozen=True)
class Address:
    """A file or a folder.

    Attributes:
        url: as fsspec takes it; a path, for a disk.
        path: what its file system calls it.
        is_local: whether it is on a disk.
    """

    url: str
    path: str
    is_local: bool

    @classmethod
    def of(cls, text: str | Path) -> Address:
        """An address from what a person wrote.

        Raises:
            ValueError: where fsspec does not know such a store.
        """
        try:
            store, path = fsspec.core.url_to_fs(os.fspath(text))
        except (ImportError, ValueError) as error:
            raise UsageError(f"{text} cannot be opened: {error}") from error
        is_local = isinstance(store, LocalFileSystem)
        return cls(path if is_local else os.fspath(text).rstrip("/"), path.rstrip("/") or "/", is_local)

    @property
    def store(self) -> Any:
        """Its file system. Asked for anew each time: one that came through a fork can wait forever."""
        return fsspec.core.url_to_fs(self.url)[0]

    @property
    def name(self) -> str:
        """The last part."""
        return PurePosixPath(self.path).name

    @property
    def parent(self) -> Address:
        """The folder that it is in."""
        path = str(PurePosixPath(self.path).parent)
        return Address(path if self.is_local else self.url.rpartition("/")[0], path, self.is_local)

    def below(self, name: str) -> Address:
        """What has this name in the folder; or an address of its own, if the name is one."""
        if "://" in name or (self.is_local and os.path.isabs(name)):
            return Address.of(name)
        path = f"{self.path.rstrip('/')}/{name}"
        return Address(path if self.is_local else f"{self.url}/{name}", path, self.is_local)

    def read_listed(self, name: str) -> bytes:
        """The file that a row of a table in the folder names.

        Raises:
            BadImageError: where its address is none.
            OSError: where it cannot be read.
            ShardError: where its store cannot, or what opens such stores is missing, or nothing can be read.
        """
        try:
            where = self.below(name)
        except ValueError as error:
            if isinstance(error.__cause__, ImportError):  # to be installed, and then all such rows are there
                raise ShardError(str(error)) from error
            raise BadImageError("unreadable", str(error)) from error
        try:
            return where.read()
        except (ShardError, BadImageError):
            raise
        except ValueError as error:  # a name that no file can have
            raise BadImageError("unreadable", str(error)) from error
        except OSError as error:
            is_refused = not where.is_local and isinstance(error, PermissionError)
            if is_passing(error) or (is_refused and where.parent._refuses()):
                raise cannot_go_on(where.url, error) from error
            raise

    def _refuses(self) -> bool:
        """Whether a store does not even list a folder, as when a key has run out."""
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
        """Whether it is one.

        Raises:
            FileNotFoundError: where there is nothing.
            OSError: where the store does not answer.
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
        """All bytes of a file; a store is asked again if it fails.

        Raises:
            OSError: where this file cannot be read.
            ShardError: where the store cannot.
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
        """The file, to read parts of it."""
        return open(self.path, "rb") if self.is_local else self.store.open(self.path, "rb")

    def files(self, wanted: Any) -> list[str]:
        """The names of the files in the folder and below that ``wanted`` says yes to, in order."""
        if self.is_local:
            return list(files_under(Path(self.path), wanted))
        found = (path[len(self.path) :].lstrip("/") for path in self.store.find(self.path))
        return sorted(name for name in found if all(map(is_visible, name.split("/"))) and wanted(name))
