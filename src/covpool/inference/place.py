"""Folders of output files, on disk or in object storage, and the manifest of the files that are finished."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from covpool.errors import StorageError, UsageError
from covpool.storage.address import MAX_FILE_BYTES, Address
from covpool.storage.files import digest, open_regular, read_file, rename_file, sync_folder, write_file
from covpool.storage.folders import held
from covpool.storage.manifest import Manifest, Part, part_of
from covpool.storage.remote import patiently
from covpool.terminal import human

# The ending of files that are being written.
SAVING = ".covpool-saving"
# Object storage in which an object appears once it is complete; elsewhere a file grows under its name.
WHOLE_OBJECTS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "memory"})


# The last bytes of a file, with the footer of a Parquet file of up to a hundred columns.
TAIL = 1 << 14


class Place(Protocol):
    """A folder of output files; each file is complete or absent.

    Attributes:
        has_locks: whether :meth:`held` keeps other processes out.
    """

    has_locks: bool

    def sizes(self) -> dict[str, int]:
        """Return the size of each file by name, without hidden ones."""

    def tail(self, name: str) -> bytes | None:
        """Return the last bytes of a file; ``None`` if that would take a request."""

    def read(self, name: str) -> bytes:
        """Return the content of a file."""

    def write(self, name: str, data: bytes) -> None:
        """Write a file; if writing fails, the file does not exist."""

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Keep other processes from writing, if possible, and remove partial files of a killed process."""


class Disk:
    """A local folder."""

    has_locks = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def sizes(self) -> dict[str, int]:
        """List."""
        if not self.folder.exists():
            return {}
        with os.scandir(self.folder) as entries:
            return {
                entry.name: entry.stat(follow_symlinks=False).st_size
                for entry in entries
                if entry.name[0] != "."
            }

    def tail(self, name: str) -> bytes | None:
        """Read the end."""
        with open_regular(self.folder / name) as file:
            file.seek(-min(TAIL, os.fstat(file.fileno()).st_size), os.SEEK_END)
            return file.readall()

    def read(self, name: str) -> bytes:
        """Read."""
        return read_file(self.folder / name, MAX_FILE_BYTES)

    def write(self, name: str, data: bytes) -> None:
        """Write under a temporary name, and rename the complete file."""
        saving = self.folder / f".{name}.{secrets.token_hex(4)}{SAVING}"
        try:
            write_file(saving, data)
            rename_file(saving, self.folder / name)
        finally:
            saving.unlink(missing_ok=True)
        sync_folder(self.folder)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold a lock that dies with this process, and that its workers do not inherit."""
        with held(self.folder):
            for left in self.folder.glob(f".*{SAVING}"):
                left.unlink(missing_ok=True)
            yield


class Bucket:
    """A folder in object storage."""

    has_locks = False

    def __init__(self, address: Address) -> None:
        self.address = address

    def sizes(self) -> dict[str, int]:
        """List."""

        def attempt() -> dict[str, int]:
            store = self.address.store
            try:
                store.invalidate_cache(self.address.path)
                entries = store.ls(self.address.path, detail=True)
            except FileNotFoundError:
                return {}
            sizes = {entry["name"].rpartition("/")[2]: int(entry.get("size") or 0) for entry in entries}
            # Some servers list the folder itself, with an empty name.
            return {name: size for name, size in sizes.items() if name and not name.startswith(".")}

        return patiently(self.address.url, attempt)

    def tail(self, name: str) -> bytes | None:
        """Return ``None``."""
        return None

    def read(self, name: str) -> bytes:
        """Download."""
        return self.address.below(name).read(MAX_FILE_BYTES)

    def write(self, name: str, data: bytes) -> None:
        """Upload; where a file would grow under its name, upload under a temporary one and rename."""
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
            if store.exists(where.path):  # from an attempt whose answer was lost; not every server replaces
                store.rm_file(where.path)
            store.mv(saving.path, where.path)

        patiently(where.url, attempt, "written")

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: object storage has no locks."""
        return contextlib.nullcontext()


def open_place(out: str | Path) -> Place:
    """Return the folder at an address; it is made when something is written."""
    address = Address.of(out)
    return Disk(Path(address.path)) if address.is_local else Bucket(address)


# Programs that read a folder of tables skip names that begin with an underscore.
MANIFEST = "_manifest.json"
# The manifest is saved when it has grown by this share, so a job of a million files writes few of them.
GROWTH = 0.1


def table_part(data: bytes, unreachable: int) -> Part:
    """Return the entry of a file of rows: also the hash of its last bytes, and its rows without an answer."""
    return part_of(data, tail=digest(data[-TAIL:]), unreachable=unreachable)


class OutputManifest:
    """The finished files of a job. A kill loses its last entries; those files are then read to check them."""

    def __init__(self, place: Place) -> None:
        self.place, self.parts, self._new = place, dict[str, Part](), 0

    def read(self, there: dict[str, int]) -> None:
        """Read the entries of the files that are there; a damaged manifest has none."""
        if MANIFEST in there:
            with contextlib.suppress(StorageError):
                parts = Manifest.read(self.place.read(MANIFEST)).parts
                self.parts = {name: part for name, part in parts.items() if name in there}

    def add(self, parts: Mapping[str, Part]) -> None:
        """Add or replace entries."""
        self.parts |= parts
        self._new += 1
        if self._new > GROWTH * len(self.parts) + 10:
            self.save()

    def save(self) -> None:
        """Write the manifest if there are new entries."""
        if self._new:
            self.place.write(MANIFEST, Manifest(self.parts).written())
            self._new = 0

    def is_valid(self, name: str, size: int, thoroughly: bool) -> bool:
        """Return whether a file is as it was written.

        Args:
            name: a file in the manifest.
            size: its size now.
            thoroughly: read all of it; otherwise its size and its last bytes are compared.
        """
        part = self.parts[name]
        if size != part.bytes:
            return False
        if thoroughly:
            return digest(self.place.read(name)) == part.sha256
        tail = self.place.tail(name)
        return tail is None or digest(tail) == part.facts.get("tail")


def check_room(folder: Path, size: int, what: str, option: str) -> None:
    """Raise if a disk has too little free space for the features.

    Args:
        folder: a folder on that disk.
        size: number of bytes needed.
        what: beginning of the message, on the size.
        option: the option that names another folder.
    """
    free = shutil.disk_usage(folder).free
    if size > free:
        raise UsageError(f"{what}, and {folder} has {human(free, 'B')} free: give another {option}")
