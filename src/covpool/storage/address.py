"""Paths and URLs: which ones a row may name, how they are read within limits, and what their errors mean."""

from __future__ import annotations

import os
import posixpath
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from covpool.errors import (
    BadImageError,
    ShardError,
    TooLargeError,
    UnreachableError,
    UsageError,
)
from covpool.storage.files import open_regular, read_file
from covpool.storage.remote import (
    ANY,
    MAX_BODY_BYTES,
    Requests,
    cannot_go_on,
    current,
    is_passing,
    patiently,
    pauses_before,
    rows_are_trusted,
)

# What a row may name. Other schemes of fsspec unpack archives, run commands or fill in templates.
SCHEMES = frozenset({"file", "http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf"})
HTTP = ("http://", "https://")
IPV6_HOST = re.compile(r"(?<=^http://)\[[0-9a-f:.]+\]|(?<=^https://)\[[0-9a-f:.]+\]", re.IGNORECASE)
# How often a path may be percent-encoded.
MAX_DECODED = 4
# HTTP status codes that are about one file and will not change; others that are not worth a retry.
GONE = (400, 404, 405, 406, 410, 414, 415)
REFUSED = (401, 403, 407, 451)
# After this many failed URLs in sequence, further ones are not retried: the store must be down.
PATIENCE = 3
# Twice the bytes of a photograph at Pillow's pixel limit, uncompressed, with 16 bits per color.
MAX_FILE_BYTES = 1 << 30
_failed = 0  # URLs in sequence, in this process


def open_store(url: str, home: str | None = None, requests: Requests | None = None) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in that file system.

    Args:
        url: a path or URL for fsspec.
        home: the host that may be private; that of the URL if not given, as for the command line.
        requests: the limits of requests.

    Raises:
        ImportError: if a package is missing.
        ValueError: if fsspec cannot open such URLs.
    """
    import fsspec  # here, because the import takes a while

    options: dict[str, Any] = {}
    if url.startswith(HTTP):
        from covpool.storage.http import client, host_of

        home = home or (ANY if rows_are_trusted() else host_of(url))
        options["get_client"] = client(home, requests or current())
        # Not by url_to_fs, which takes the :: of an IPv6 address for a chain.
        return fsspec.filesystem(url.partition(":")[0], **options), url
    store, path = fsspec.core.url_to_fs(url)
    return store, path


@dataclass(frozen=True)
class Address:
    """A file or a folder.

    Attributes:
        url: the URL for fsspec; for a local file, its path.
        path: its path in its file system.
        is_local: whether it is on a local disk.
        home: host that may be on a private network, since the command line names it; ``"*"`` if rows are
            trusted.
        requests: the limits of requests.
    """

    url: str
    path: str
    is_local: bool
    home: str = ""
    requests: Requests = field(default_factory=current)

    @classmethod
    def of(cls, text: str | Path) -> Address:
        """Return the address of a path or URL that the command line names.

        Raises:
            UsageError: if fsspec cannot open such URLs.
        """
        from fsspec.implementations.local import LocalFileSystem

        url = os.fspath(text)
        home = ANY if rows_are_trusted() else ""
        try:
            store, path = open_store(url)
            if not home and url.startswith(HTTP):
                from covpool.storage.http import host_of

                home = host_of(url)
        except (ImportError, ValueError) as error:
            raise UsageError(f"{text} cannot be opened: {error}") from error
        is_local = isinstance(store, LocalFileSystem)
        return cls(path if is_local else url.rstrip("/"), path.rstrip("/") or "/", is_local, home)

    @property
    def store(self) -> Any:
        """Its file system, made for each use: one that was made before a fork can wait forever."""
        return open_store(self.url, self.home or "-", self.requests)[0]

    @property
    def name(self) -> str:
        """The last part of the path."""
        return PurePosixPath(self.path).name

    @property
    def parent(self) -> Address:
        """The folder that holds it."""
        path = self.path.rpartition("/")[0] or "/"  # for HTTP, a path is a URL
        return replace(self, url=path if self.is_local else self.url.rpartition("/")[0], path=path)

    def below(self, name: str) -> Address:
        """Return the address of a name in the folder."""
        path = f"{self.path.rstrip('/')}/{name}"
        return replace(self, url=path if self.is_local else f"{self.url}/{name}", path=path)

    def trusted(self) -> Address:
        """Return a local folder whose own listing names its files, not a table. Links are followed."""
        return replace(self, home=ANY) if self.is_local else self

    def listed(self, name: str) -> Address:
        """Return the address that a row of a table in the folder names.

        Every path or URL that comes from a file passes here. A URL has one of a few schemes and is not a
        chain (``::``). A path stays below the folder. A host is not on a private network. ``--trust-rows``
        lifts the last two.

        Raises:
            UnreachableError: if the row may not name it.
            BadImageError: if it is not a valid URL.
            ShardError: if a package is missing.
        """
        url = re.match(r"([a-z][a-z0-9+.-]*)://(.*)", name, re.IGNORECASE | re.DOTALL)
        is_chain = "::" in IPV6_HOST.sub("", name) and "://" in name
        if url is None and not is_chain:
            return self._inside(name)
        scheme, rest = (url[1].lower(), url[2]) if url else ("", "")
        if is_chain or scheme not in SCHEMES:
            what = "a chain of URLs" if is_chain else f"a URL of {scheme[:20]!r}"
            raise UnreachableError(f"a row may not name {what}: use a path or {', '.join(sorted(SCHEMES))}")
        if scheme == "file":
            if not self.is_local and self.home != ANY:
                raise UnreachableError("a table on a server may not name local files: pass --trust-rows")
            root = self if self.is_local else Address("/", "/", True, self.home, self.requests)
            return root._inside(rest)
        try:
            if scheme in ("http", "https"):
                from covpool.storage.http import check_url

                check_url(name, self.home)
            _, path = open_store(name, self.home or "-", self.requests)
        except ImportError as error:  # once installed, all such rows can be read
            raise ShardError(f"{name} cannot be opened: {error}") from error
        except BadImageError:
            raise
        except ValueError as error:
            raise BadImageError("unreadable", f"it cannot be opened: {error}") from error
        return Address(name, path, False, self.home, self.requests)

    def _inside(self, name: str) -> Address:
        """Return the address of a path from the folder, which may lead out of it if rows are trusted."""
        if not self.is_local:
            inside = posixpath.normpath(_decoded(name))
            if "::" in name or (self.home != ANY and inside.split("/")[0] == ".."):
                raise UnreachableError("a row may not lead out of the folder of its table")
            return self.below(name)
        # The path is normalized: what is checked is what is opened.
        path = os.path.normpath(os.path.join(self.path, name))
        roots = (os.path.normpath(self.path), os.path.realpath(self.path))
        if self.home != ANY and not any(is_below(path, root) for root in roots):
            raise UnreachableError(
                f"it is outside {self.path}, the folder of the table: move the table, or pass --trust-rows"
            )
        if self.home != ANY and "\0" not in path and not is_below(os.path.realpath(path), roots[1]):
            raise UnreachableError(f"it is a link out of {self.path}: copy the file, or pass --trust-rows")
        return replace(self, url=path, path=path)

    def read_listed(self, name: str) -> bytes:
        """Return the bytes of a file that a table in the folder lists.

        Raises:
            BadImageError: if its path or URL is not valid, or it is too large.
            OSError: if it cannot be read.
            ShardError: if a package is missing, the machine has an error, or too many URLs failed.
        """
        global _failed
        try:
            where = self.listed(name)
            data = where._read_once()
        except UnreachableError as error:
            _failed += 1
            if _failed <= self.requests.max_bad:
                raise
            raise ShardError(
                f"{_failed:,} URLs in sequence failed, and max_bad is {self.requests.max_bad}; the last is "
                f"{name}: {error}. If the server is down, rerun the command later to resume. If the rows are "
                "bad, raise --max-bad"
            ) from error
        if not where.is_local:
            _failed = 0
        return data

    def _read_once(self) -> bytes:
        """Return the bytes for a row: a URL that does not answer is the error of one row."""
        if not self.is_local:
            until = time.monotonic() + self.requests.timeout
            pauses = pauses_before(self.requests.retries) if _failed < PATIENCE else ()
            try:
                return self._request(MAX_BODY_BYTES, pauses, until=until)
            except ShardError as error:
                if isinstance(error.__cause__, ImportError):
                    raise
                raise UnreachableError(str(error)) from error
            except PermissionError as error:
                raise UnreachableError(str(error)) from error
        try:
            return read_image(self.path)
        except BadImageError:
            raise
        except ValueError as error:  # no file can have this name
            raise BadImageError("unreadable", str(error)) from error
        except OSError as error:
            if is_passing(error):
                raise cannot_go_on(self.url, error) from error
            raise

    def is_folder(self) -> bool:
        """Return whether it is a folder.

        Raises:
            FileNotFoundError: if it does not exist.
            ShardError: if object storage does not answer.
        """
        if self.is_local:
            os.stat(self.path)
            return os.path.isdir(self.path)

        until = time.monotonic() + self.requests.timeout

        def look() -> tuple[bool, bool]:
            is_folder = bool(self._ask("isdir", until))
            return is_folder, is_folder or bool(self._ask("exists", until))

        is_folder, is_there = patiently(self.url, look, "reached", until=until)
        if not is_there:
            raise FileNotFoundError(f"{self.url} does not exist")
        return is_folder

    def exists(self) -> bool:
        """Return whether a file is in object storage.

        Raises:
            ShardError: if the storage does not answer. ``exists`` of fsspec returns False for errors, which
                would silently drop a split.
        """
        until = time.monotonic() + self.requests.timeout

        def attempt() -> bool:
            try:
                self._ask("cat_file", until, start=0, end=1)
            except FileNotFoundError:
                return False
            except Exception as error:
                # Without permission to list files, object storage answers 403 for every missing file.
                if isinstance(error, PermissionError) or getattr(error, "status", None) == 403:
                    return False
                raise
            return True

        return patiently(self.url, attempt, until=until)

    def files_below(self) -> list[str]:
        """Return the paths of all files in a folder of object storage and below.

        Raises:
            ShardError: if the storage does not answer.
        """
        # A server could list folders without end. Object storage with millions of files takes its time.
        seconds = self.requests.table_timeout if self.url.startswith(HTTP) else float("inf")
        until = time.monotonic() + seconds
        return patiently(self.url, lambda: list(self._ask("find", until)), "listed", until=until)

    def read(self, limit: int = MAX_BODY_BYTES) -> bytes:
        """Return the bytes of a file; requests to object storage are repeated if they fail.

        Raises:
            OSError: if this file cannot be read.
            BadImageError: if it is too large.
            ShardError: if object storage does not answer.
        """
        if self.is_local:
            return read_image(self.path)
        return self._request(limit, until=time.monotonic() + self.requests.table_timeout)

    def _request(self, limit: int, pauses: Sequence[float] | None = None, *, until: float) -> bytes:
        def attempt() -> bytes | OSError:
            try:
                return self._cat(limit + 1, until)
            except FileNotFoundError:
                return FileNotFoundError("the file does not exist")
            except PermissionError as error:
                return PermissionError(f"the store does not give it: {error}")
            except Exception as error:
                status = getattr(error, "status", None)  # of HTTP
                if status in GONE:
                    return OSError(f"the server answers {status}")
                if status in REFUSED:
                    return PermissionError(f"the server answers {status}")
                raise

        content = patiently(self.url, attempt, pauses=pauses, until=until)
        if isinstance(content, OSError):
            raise content
        if len(content) > limit:
            raise BadImageError("too large", f"the store sends more than {limit:,} bytes")
        return content

    def _cat(self, end: int, until: float) -> bytes:
        """Request up to a number of bytes."""
        # Over HTTP the client has a limit: a server may ignore the range.
        part = {} if self.url.startswith(HTTP) else {"start": 0, "end": end}
        data: bytes = self._ask("cat_file", until, **part)
        return data

    def _ask(self, method: str, until: float, **options: int) -> Any:
        """Call a method of the file system on the path; give up at a time, by ``time.monotonic``."""
        from fsspec.asyn import sync

        store = self.store
        if not store.async_impl:
            return getattr(store, method)(self.path, **options)
        seconds = None if until == float("inf") else max(until - time.monotonic(), 0.1)
        return sync(store.loop, getattr(store, f"_{method}"), self.path, timeout=seconds, **options)

    def opened(self) -> Any:
        """Return the open file, to read parts of it."""
        return open_regular(self.path) if self.is_local else self.store.open(self.path, "rb")


def read_image(path: str) -> bytes:
    """Return the bytes of a file that should be an image.

    Raises:
        OSError: if it cannot be read, or is not a regular file.
        BadImageError: if it is much too large for an image, or its name is invalid.
    """
    try:
        return read_file(path, MAX_FILE_BYTES)
    except TooLargeError as error:
        raise BadImageError("too large", f"the file has more than {MAX_FILE_BYTES:,} bytes") from error
    except ValueError as error:  # a null character in the name
        raise BadImageError("unreadable", f"{path!r} is not a valid file name: {error}") from error


def _decoded(name: str) -> str:
    """Return a path as a server may understand it, without percent signs that hide dots and slashes."""
    for _ in range(MAX_DECODED):
        name, before = unquote(name), name
        if name == before:
            return name
    raise UnreachableError("a row may not encode a path so often")


def is_below(path: str, folder: str) -> bool:
    """Return whether a normalized path lies in a normalized folder.

    Example:
        >>> is_below("/a/b/c", "/a/b"), is_below("/a/bc", "/a/b"), is_below("/a", "/")
        (True, False, True)
    """
    return path.startswith(folder.rstrip(os.sep) + os.sep)
