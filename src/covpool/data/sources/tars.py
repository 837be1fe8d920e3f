"""Images in tar files without labels."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path, PurePosixPath

from covpool.data.image_set import MAX_FILE_BYTES, Group
from covpool.data.remote import Address, cannot_go_on, is_passing
from covpool.data.shards.index import write_index
from covpool.data.shards.reader import ShardSet
from covpool.data.shards.scan import TarImage, find_images
from covpool.errors import BadImageError, ShardError, UsageError


class IndexedTars:
    """Shards of ``covpool shard``, on a disk or in a store. Their labels do not matter."""

    def __init__(self, shards: ShardSet) -> None:
        self.shards = shards

    def __len__(self) -> int:
        return len(self.shards)

    def name(self, i: int) -> str:
        """As the index has it."""
        return self.shards.name(i)

    def read(self, i: int) -> bytes:
        """From its tar."""
        try:
            return self.shards.read(i)
        except OSError as error:
            if is_passing(error) or isinstance(error, FileNotFoundError):
                raise cannot_go_on(self.name(i), error) from error
            raise

    def groups(self, rows: int) -> list[Group]:
        """A tar each."""
        return [Group(PurePosixPath(shard.name).stem, shard.samples) for shard in self.shards.index.shards]

    def fingerprint(self) -> str:
        """Of the index, which has a hash of what is in each tar."""
        return hashlib.sha256(write_index(self.shards.index)).hexdigest()


class Tars:
    """Tars on a disk without an index: their headers are read when they are opened, and again where needed.

    Args:
        root: the folder that names start from.
        names: of the tars.
    """

    def __init__(self, root: Address, names: list[str]) -> None:
        if not root.is_local:
            raise UsageError(
                f"{root.url} has tars without an index.json, and in a store nothing is found in them: "
                "make one by 'covpool shard --index', which takes images with a label, or copy them to a disk"
            )
        self.root, self.names = Path(root.path), names
        self.counts, told = list[int](), hashlib.sha256()
        for name in names:
            found = find_images(self.root / name)
            self.counts.append(len(found))
            date = (self.root / name).stat().st_mtime_ns
            told.update(os.fsencode(repr((name, date, [tuple(image) for image in found]))))
        self._fingerprint = told.hexdigest()
        self._ends = list(accumulate(self.counts))
        self._found: tuple[int, list[TarImage]] = -1, []

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def name(self, i: int) -> str:
        """The tar's name, and the image's in it."""
        path, image = self._find(i)
        return f"{path.relative_to(self.root).as_posix()}/{image.name}"

    def read(self, i: int) -> bytes:
        """From its tar."""
        path, image = self._find(i)
        if image.size > MAX_FILE_BYTES:
            raise BadImageError("too large", f"it has {image.size:,} bytes in {path.name}")
        try:
            with path.open("rb") as file:
                file.seek(image.offset)
                data = file.read(image.size)
        except OSError as error:
            if is_passing(error) or isinstance(error, FileNotFoundError):
                raise cannot_go_on(path, error) from error
            raise
        if len(data) < image.size:
            raise ShardError(f"the input cannot be read any more: {path} was cut short")
        return data

    def groups(self, rows: int) -> list[Group]:
        """A tar each."""
        return [
            Group(PurePosixPath(name).stem, count)
            for name, count in zip(self.names, self.counts, strict=True)
        ]

    def fingerprint(self) -> str:
        """Of the tars' names and dates, and of where in them which images lie."""
        return self._fingerprint

    def _find(self, i: int) -> tuple[Path, TarImage]:
        tar = bisect_right(self._ends, i)
        path = self.root / self.names[tar]
        if self._found[0] != tar:  # images come in a row, so one tar is enough to remember
            self._found = tar, find_images(path)
        return path, self._found[1][i - self._ends[tar] + self.counts[tar]]
