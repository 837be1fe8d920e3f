"""Folders of output files, local or in object storage; each file is complete or absent."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from covpool.data.remote import Address
from covpool.data.shards.remote import patiently
from covpool.durable import held, sync_folder, write_file

# The ending of files on their way.
SAVING = ".covpool-saving"
# Stores in which an object appears when all of it has arrived; in others a file grows under its name.
WHOLE_OBJECTS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "memory"})


class Place(Protocol):
    """A folder for rows.

    Attributes:
        has_locks: whether :meth:`held` keeps others out.
    """

    has_locks: bool

    def names(self) -> set[str]:
        """Of its files, hidden ones left out."""

    def read(self, name: str) -> bytes:
        """A file."""

    def write(self, name: str, data: bytes) -> None:
        """Write a file, which is there whole afterwards; if it fails, it is not there."""

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Keep others from writing, where that is possible, and remove what a killed process left."""


class Disk:
    """A local folder."""

    has_locks = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> set[str]:
        """List."""
        if not self.folder.exists():
            return set()
        return {name for name in os.listdir(self.folder) if not name.startswith(".")}

    def read(self, name: str) -> bytes:
        """Read."""
        return (self.folder / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        """Write under another name, and rename when it is on the disk."""
        saving = self.folder / f".{name}.{secrets.token_hex(4)}{SAVING}"
        try:
            write_file(saving, data)
            os.replace(saving, self.folder / name)
        finally:
            saving.unlink(missing_ok=True)
        sync_folder(self.folder)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """By a lock that dies with this process, and that its workers do not inherit."""
        with held(self.folder):
            for left in self.folder.glob(f".*{SAVING}"):
                left.unlink(missing_ok=True)
            yield


class Store:
    """A folder in a store."""

    has_locks = False

    def __init__(self, address: Address) -> None:
        self.address = address

    def names(self) -> set[str]:
        """List."""

        def attempt() -> set[str]:
            store = self.address.store
            try:
                names = {path.rpartition("/")[2] for path in store.ls(self.address.path, detail=False)}
            except FileNotFoundError:
                return set()
            # The empty name is the folder's own, as some stores list it.
            return {name for name in names if name and not name.startswith(".")}

        return patiently(self.address.url, attempt)

    def read(self, name: str) -> bytes:
        """Download."""
        return self.address.below(name).read()

    def write(self, name: str, data: bytes) -> None:
        """Upload; where a file would grow under its name, under another, and rename."""
        where = self.address.below(name)
        saving = self.address.below(f".{name}.{secrets.token_hex(4)}{SAVING}")

        def attempt() -> None:
            store = self.address.store
            protocols = {store.protocol} if isinstance(store.protocol, str) else set(store.protocol)
            if protocols & WHOLE_OBJECTS:
                store.pipe_file(where.path, data)
                return
            store.makedirs(self.address.path, exist_ok=True)
            store.pipe_file(saving.path, data)
            if store.exists(where.path):  # of a try whose answer was lost; not every store moves onto a file
                store.rm_file(where.path)
            store.mv(saving.path, where.path)

        patiently(where.url, attempt, "written")

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Nothing."""
        return contextlib.nullcontext()


def open_place(out: str | Path) -> Place:
    """The folder at an address; it is made when something is written."""
    address = Address.of(out)
    return Disk(Path(address.path)) if address.is_local else Store(address)
