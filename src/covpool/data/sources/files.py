"""Single image files, and plain folders and lists of images without labels."""

from __future__ import annotations

import csv
import hashlib
import io
import os
from collections.abc import Iterable, Iterator

from covpool.data.image_set import Group, Names
from covpool.data.remote import Address, cannot_go_on, was_taken_off
from covpool.errors import UsageError


class FileImages:
    """Files by their names.

    Args:
        root: the folder that names start from.
        names: of the files.
    """

    def __init__(self, root: Address, names: Iterable[str]) -> None:
        self.root, self.names = root, Names(names)
        self._fingerprint, self._absent = self._looked_at()

    def __len__(self) -> int:
        return len(self.names)

    def name(self, i: int) -> str:
        """From the folder on."""
        return self.names[i]

    def read(self, i: int) -> bytes:
        """All of the file."""
        try:
            return self.root.read_listed(self.names[i])
        except OSError as error:
            was_there = self.root.is_local and i not in self._absent
            path = os.path.join(self.root.path, self.names[i])
            if was_there and was_taken_off(path, error):
                raise cannot_go_on(path, error) from error
            raise

    def groups(self, rows: int) -> list[Group]:
        """One, to be cut."""
        return [Group("", len(self))]

    def fingerprint(self) -> str:
        """Of the names, and on a disk of sizes and dates; in a store of the folder's address instead."""
        return self._fingerprint

    def _looked_at(self) -> tuple[str, frozenset[int]]:
        """The fingerprint, and the numbers of the files that are not on the disk now."""
        told, absent = hashlib.sha256(bytes(self.names.joined) + self.names.ends.tobytes()), []
        if not self.root.is_local:
            told.update(self.root.url.encode())
            return told.hexdigest(), frozenset()
        for i, name in enumerate(self.names):
            stamp = _stamp(os.path.join(self.root.path, name))
            told.update(stamp or b"-")
            if stamp is None:
                absent.append(i)
        return told.hexdigest(), frozenset(absent)


def _stamp(path: str) -> bytes | None:
    """What changes when a file does; ``None`` for what is not there, such as an address in a list."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return f"{status.st_size},{status.st_mtime_ns};".encode()


def read_table(address: Address) -> FileImages:
    """The images in the column ``path`` of a CSV, from its folder on; other columns do not matter.

    Raises:
        ValueError: with what is wrong.
    """
    try:
        text = address.read().decode("utf-8-sig")
        separator = max(",;\t", key=text.partition("\n")[0].count)
        return FileImages(address.parent, _paths(address, csv.reader(io.StringIO(text), delimiter=separator)))
    except UnicodeDecodeError as error:
        raise UsageError(f"{address.url} is not in UTF-8: save it as 'CSV UTF-8'") from error
    except csv.Error as error:
        raise UsageError(f"{address.url} is no CSV: {error}") from error


def _paths(address: Address, lines: Iterator[list[str]]) -> Iterator[str]:
    header = [name.strip().lower() for name in next(lines, [])]
    if "path" not in header:
        raise UsageError(f"{address.url} has no column 'path': its first line is {','.join(header)!r}")
    place = header.index("path")
    for number, line in enumerate(lines, start=2):
        if not line:
            continue
        if len(line) <= place or not line[place].strip():
            raise UsageError(f"{address.url} has no path in row {number}")
        yield line[place].strip()
