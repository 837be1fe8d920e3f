"""Tars of images: with an index, as ``covpool shard`` writes them, they have labels.

Shards are in one folder, or in one per split. Any tars can be read without labels.
"""

from __future__ import annotations

import io
import logging
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path, PurePosixPath

from covpool.data.image_set import BaseSet, Group, ImageSet
from covpool.data.listing import check_alike, list_below
from covpool.data.shards.scan import TarImage, find_images
from covpool.data.sources import SPLITS, Marks, Split
from covpool.errors import BadImageError, ShardError, UsageError
from covpool.storage.address import MAX_FILE_BYTES, Address
from covpool.storage.files import Digest, open_regular
from covpool.storage.remote import cannot_go_on, is_passing
from covpool.terminal import counted

LOGGER = logging.getLogger("covpool")
INDEX, EXTENSION = "index.json", ".tar"
# Other programs write an index.json too, so it counts next to tars.
MARKS = Marks(endings=(EXTENSION,), in_folders=True, files=(INDEX, *(f"{split}/{INDEX}" for split in SPLITS)))


def open_splits(path: str, cache: str | None = None) -> Mapping[Split, ImageSet]:
    """Open the shards of each split by their index."""
    from covpool.data.shards.reader import open_shards  # here, because the import of fsspec takes a while

    address = Address.of(path)
    if _has_index(address):
        return {"train": open_shards(path, cache=cache)}
    folders = {split: address.below(split) for split in SPLITS}
    indexed = {split: folder for split, folder in folders.items() if _has_index(folder)}
    if not indexed:
        raise UsageError(
            f"{path} has no {INDEX}: 'covpool shard' writes shards and their index, and "
            "'covpool shard --index' the index of other tars"
        )
    return {split: open_shards(folder.url, cache=cache) for split, folder in indexed.items()}


def open_unlabeled(path: str) -> ImageSet:
    """Open the shards of a folder by their index; other tars in it and below by their headers."""
    address = Address.of(path)
    if address.url.lower().endswith(EXTENSION):
        return open_files(address.parent, [address.name])
    if not _has_index(address):  # also for shards of splits, whose ids would not be unique
        return open_files(address, list_below(address))
    from covpool.data.shards.reader import open_shards

    shards = open_shards(path)
    if shards.index.left_out:
        message = (
            f"{path}: its {INDEX} is without {counted(shards.index.left_out, 'sample')} that "
            f"have no label or no image. Remove {INDEX} from a local folder to read all images"
        )
        if not len(shards):
            raise UsageError(message)
        LOGGER.warning(message)
    return shards


def open_files(root: Address, names: Sequence[str]) -> ImageSet:
    """Open tars by name."""
    check_alike(root, names, EXTENSION)
    return Tars(root, names)


def _has_index(folder: Address) -> bool:
    if not folder.is_local:
        from covpool.data.shards.index import has_index

        return has_index(folder.url)
    # Other programs write an index.json too.
    return os.path.isfile(folder.below(INDEX).path) and any(Path(folder.path).glob("*.tar"))


class Tars(BaseSet):
    """The images of local tars. The headers of a tar are read when it is opened, and again for its images."""

    classes: tuple[str, ...] = ()
    labels = None

    def __init__(self, root: Address, names: Sequence[str]) -> None:
        if not root.is_local:
            raise UsageError(
                f"{root.url} has tars without an index.json, which are only read from a local disk: "
                "copy them, or write an index of labeled images with 'covpool shard --index'"
            )
        self.root, self.names = Path(root.path), names
        self.counts, digest = list[int](), Digest()
        for name in names:
            images = find_images(self.root / name)
            self.counts.append(len(images))
            date = (self.root / name).stat().st_mtime_ns
            digest.update(os.fsencode(repr((name, date, [tuple(image) for image in images]))))
        self._stamp = digest.hexdigest()
        self._ends = list(accumulate(self.counts))
        self._remembered: tuple[int, list[TarImage]] = -1, []

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def name(self, i: int) -> str:
        """Return the name of the tar and of the image in it."""
        path, image = self._find(i)
        return f"{path.relative_to(self.root).as_posix()}/{image.name}"

    def read(self, i: int) -> bytes:
        """Return the bytes of an image."""
        path, image = self._find(i)
        if image.size > MAX_FILE_BYTES:
            raise BadImageError("too large", f"it has {image.size:,} bytes in {path.name}")
        try:
            with io.BufferedReader(open_regular(path)) as file:
                file.seek(image.offset)
                data = file.read(image.size)
        except OSError as error:
            if is_passing(error) or isinstance(error, FileNotFoundError):
                raise cannot_go_on(path, error) from error
            raise
        if len(data) < image.size:
            raise ShardError(f"the input cannot be read any more: {path} was truncated")
        return data

    def group_sizes(self) -> Sequence[int]:
        """Return the number of images in each tar."""
        return self.counts

    def groups(self, rows: int) -> list[Group]:
        """Return a group per tar."""
        stems = (PurePosixPath(name).stem for name in self.names)
        return [Group(*group) for group in zip(stems, self.counts, strict=True)]

    def stamp(self) -> str:
        """Return a hash of the tars' names and dates, and of the names and offsets of the images."""
        return self._stamp

    def _find(self, i: int) -> tuple[Path, TarImage]:
        tar = bisect_right(self._ends, i)
        path = self.root / self.names[tar]
        if self._remembered[0] != tar:  # images are read in order, so one tar is enough to remember
            self._remembered = tar, find_images(path)
        return path, self._remembered[1][i - self._ends[tar] + self.counts[tar]]
