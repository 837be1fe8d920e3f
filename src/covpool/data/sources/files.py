"""Single image files without labels, and the set of images that plain folders and lists give."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping

from covpool.data.image_set import BaseSet, ImageSet, Names
from covpool.data.remote import Address, cannot_go_on, was_taken_off
from covpool.data.sources import Marks, Split
from covpool.errors import UsageError

MARKS = Marks()  # of what no other source recognizes


def open_splits(path: str, cache: str | None = None) -> Mapping[Split, ImageSet]:
    """Raise: a single image has no label."""
    raise UsageError(
        f"{path} is neither a folder nor a CSV: give a folder of classes, or a CSV of path,label"
    )


def open_unlabeled(path: str) -> ImageSet:
    """Open one image."""
    address = Address.of(path)
    return FileImages(address.parent, [address.name])


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
