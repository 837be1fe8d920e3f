"""Where rows go: a folder on a disk or in a store, whose files are whole or not there."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from covpool.data.shards.cache import patiently
from covpool.durable.replacing import sync_folder, write_file
from covpool.evaluate.bulk.inputs.address import Address
from covpool.evaluate.lock import held

# The ending of files on their way.
SAVING = ".covpool-saving"


class Place(Protocol):
    """A folder for rows."""

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
    """A folder in a store, where an object appears when all of it has arrived. It has no locks."""

    def __init__(self, address: Address) -> None:
        self.address = address

    def names(self) -> set[str]:
        """List."""

        def attempt() -> set[str]:
            store = self.address.store
            try:
                return {path.rpartition("/")[2] for path in store.ls(self.address.path, detail=False)}
            except FileNotFoundError:
                return set()

        return patiently(self.address.url, attempt)

    def read(self, name: str) -> bytes:
        """Download."""
        return self.address.below(name).read()

    def write(self, name: str, data: bytes) -> None:
        """Upload."""
        where = self.address.below(name)
        patiently(where.url, lambda: where.store.pipe_file(where.path, data))

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Nothing."""
        return contextlib.nullcontext()


def open_place(out: str | Path) -> Place:
    """The folder at an address; it is made when something is written."""
    address = Address.of(out)
    return Disk(Path(address.path)) if address.is_local else Store(address)
