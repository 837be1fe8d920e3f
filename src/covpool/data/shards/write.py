"""Write tar shards, and index shards that exist."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from covpool.data.image_set import ImageSet
from covpool.data.order import permutation
from covpool.data.shards.index import INDEX, Shard, ShardIndex, write_contents, write_index
from covpool.data.shards.scan import IMAGE_FIELDS, Scan, scan_tar
from covpool.data.sources import SPLITS
from covpool.errors import ShardError, UsageError
from covpool.storage.files import create_file, digest, replace_file
from covpool.storage.folders import new_folder, resolved


def index_shards(
    folders: Sequence[Path],
    classes: Sequence[str] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[ShardIndex], int]:
    """Index folders of tars and replace any old index. The tars are only read.

    Args:
        folders: folders of tars with the same classes; each index is written into its folder.
        classes: class names in the order of the labels (default: the names in the tars, or the labels).
        progress: called with the number of tars done and the total.

    Returns:
        The index of each folder, and the number of samples left out for lack of an image or a label.
    """
    shards: list[list[Shard]] = []
    left_out: list[int] = []
    class_names: dict[int, str] = {}
    highest = -1
    tars = [_tars(folder) for folder in folders]
    for folder, names in zip(folders, tars, strict=True):
        shards.append([])
        left_out.append(0)
        for name in names:
            shard, scan = index_tar(folder / name)
            shards[-1].append(shard)
            class_names.update(scan.classes)
            highest = max(highest, int(scan.contents.labels.max(initial=-1)))
            left_out[-1] += scan.left_out
            progress(sum(map(len, shards)), sum(map(len, tars)))
    if classes is None:
        classes = [class_names.get(label, str(label)) for label in range(highest + 1)]
    elif len(classes) <= highest:
        raise ShardError(f"there are {len(classes)} class names, but labels up to {highest}")
    parts = zip(shards, left_out, strict=True)
    indexes = [ShardIndex(tuple(classes), tuple(some), without) for some, without in parts]
    for folder, index in zip(folders, indexes, strict=True):
        save_index(folder, index)
    return indexes, sum(left_out)


def index_tar(path: Path) -> tuple[Shard, Scan]:
    """Scan a tar and write its ``.json``."""
    scan = scan_tar(path)
    data = write_contents(scan.contents)
    replace_file(path.with_name(f"{path.name}.json"), data)
    return Shard(path.name, path.stat().st_size, len(scan.contents.names), digest(data)), scan


def save_index(folder: Path, index: ShardIndex) -> None:
    """Write the index of a folder. Call it after :func:`index_tar` for every tar."""
    replace_file(folder / INDEX, write_index(index))


def tar_folders(path: Path) -> list[Path]:
    """Return the folder itself if it has tars, else its train, val and test folders that have some."""
    if _tars(path):
        return [path]
    folders = [path / split for split in SPLITS if (path / split).is_dir() and _tars(path / split)]
    if not folders:
        packed = sorted(file.name for file in path.iterdir() if ".tar." in file.name or file.suffix == ".tgz")
        also = f": {packed[0]} is compressed, decompress it first" if packed else ""
        raise ShardError(f"{path} has no tars{also}")
    return folders


def _tars(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix == ".tar" and path.is_file())


# Without this limit, shards of small images would hold 100,000 samples, and shuffle windows millions.
MAX_SAMPLES = 10_000


def write_shards(
    images: ImageSet,
    folder: str | Path,
    *,
    shard_bytes: int = 256_000_000,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> ShardIndex:
    """Write an image set as tar shards with an index. Image files are copied unchanged.

    Samples are written in random order, so that every window of shards holds all classes. The same set and
    seed give bit-identical tars.

    Args:
        images: the set.
        folder: output folder; it must not exist or be empty. It appears once it is complete.
        shard_bytes: size at which a shard is closed.
        seed: seed of the sample order.
        progress: called after each image with the number written so far and the total.
    """
    import webdataset  # imported here because it is slow

    if shard_bytes < 1:
        raise UsageError(f"shard_bytes must be at least 1; got {shard_bytes}")
    with new_folder(resolved(folder)) as saving:
        shards: list[Shard] = []
        stream = _Stream()

        def finish(name: str) -> None:
            stream.close()
            shards.append(index_tar(Path(name))[0])

        pattern = str(saving).replace("%", "%%") + "/%05d.tar"
        with webdataset.ShardWriter(
            pattern,
            maxcount=MAX_SAMPLES,
            maxsize=shard_bytes,
            verbose=0,
            opener=stream.open,
            post=finish,
            mtime=0,
        ) as writer:
            for written, i in enumerate(permutation(len(images), "write", seed)):
                writer.write(_sample(images, int(i), written))
                if progress is not None:
                    progress(written + 1, len(images))
        index = ShardIndex(tuple(images.classes), tuple(shards))
        save_index(saving, index)
    return index


def _sample(images: ImageSet, i: int, position: int) -> dict[str, str | bytes]:
    """Return a sample for webdataset. All values are bytes, so webdataset encodes nothing."""
    name, label = images.name(i), images.label(i)
    extension = PurePosixPath(name).suffix[1:].lower()
    description = json.dumps({"name": name, "class": images.classes[label]})
    return {
        "__key__": f"{position:09d}",
        extension if extension in IMAGE_FIELDS else "img": images.read(i),
        "cls": str(label).encode(),
        "json": description.encode(),
    }


class _Stream:
    """The file of the current shard. webdataset does not close it, so covpool does."""

    def __init__(self) -> None:
        self._file: BinaryIO | None = None

    def open(self, name: str) -> BinaryIO:
        self._file = io.BufferedWriter(create_file(name))
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
