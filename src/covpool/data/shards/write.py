"""Write tar shards, and index shards that exist."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from covpool.data.image_set import ImageSet
from covpool.data.order import permutation
from covpool.data.shards.index import INDEX, Shard, ShardIndex, digest, write_contents, write_index
from covpool.data.shards.scan import IMAGE_FIELDS, Scan, scan_tar
from covpool.data.sources import SPLITS
from covpool.durable import replace_file
from covpool.errors import ShardError, UsageError


def index_shards(
    folders: Sequence[Path],
    classes: Sequence[str] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[ShardIndex], int]:
    """Make the index of folders of tars, ours or others', anew. The tars are only read.

    Args:
        folders: with the tars; the index of each goes beside them. They have the same classes.
        classes: names, in the order of the labels; if not given, those in the tars, or else the labels.
        progress: is told how many tars are done, and how many there are.

    Returns:
        The index of each, and how many samples were left out because they have no image or no label.
    """
    shards: list[list[Shard]] = []
    left_out: list[int] = []
    told: dict[int, str] = {}
    highest = -1
    tars = [_tars(folder) for folder in folders]
    for folder, names in zip(folders, tars, strict=True):
        shards.append([])
        left_out.append(0)
        for name in names:
            shard, scan = index_tar(folder / name)
            shards[-1].append(shard)
            told.update(scan.classes)
            highest = max(highest, int(scan.contents.labels.max(initial=-1)))
            left_out[-1] += scan.left_out
            progress(sum(map(len, shards)), sum(map(len, tars)))
    if classes is None:
        classes = [told.get(label, str(label)) for label in range(highest + 1)]
    elif len(classes) <= highest:
        raise ShardError(f"there are {len(classes)} names of classes, and labels up to {highest}")
    found = zip(shards, left_out, strict=True)
    indexes = [ShardIndex(tuple(classes), tuple(some), without) for some, without in found]
    for folder, index in zip(folders, indexes, strict=True):
        save_index(folder, index)
    return indexes, sum(left_out)


def index_tar(path: Path) -> tuple[Shard, Scan]:
    """Scan a tar and write what is in it beside it."""
    scan = scan_tar(path)
    data = write_contents(scan.contents)
    replace_file(path.with_name(f"{path.name}.json"), data)
    return Shard(path.name, path.stat().st_size, len(scan.contents.names), digest(data)), scan


def save_index(folder: Path, index: ShardIndex) -> None:
    """Write the index of a folder, after what is in its tars."""
    replace_file(folder / INDEX, write_index(index))


def tar_folders(path: Path) -> list[Path]:
    """The folder itself if it has tars, else those of train, val and test that have some."""
    if _tars(path):
        return [path]
    folders = [path / split for split in SPLITS if (path / split).is_dir() and _tars(path / split)]
    if not folders:
        packed = sorted(file.name for file in path.iterdir() if ".tar." in file.name or file.suffix == ".tgz")
        also = f": {packed[0]} is compressed, unpack it first" if packed else ""
        raise ShardError(f"{path} has no tars{also}")
    return folders


def _tars(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix == ".tar" and path.is_file())


# Small images would otherwise make shards of a hundred thousand, and windows of millions.
MAX_SAMPLES = 10_000


def write_shards(
    images: ImageSet,
    folder: str | Path,
    *,
    shard_bytes: int = 256_000_000,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> ShardIndex:
    """Write a set into tar shards and their index. The bytes of the images are kept as they are.

    Samples are written in random order: within a window of shards there should be all classes, and a folder
    has them one after the other. The same set and seed give the same tars to the bit.

    Args:
        images: the set.
        folder: to write; it must not exist, or be empty. It appears when all is written.
        shard_bytes: the size at which a shard is closed.
        seed: of the order in the shards.
        progress: called after each image, with the number written so far and that of all.
    """
    import webdataset  # here, because it takes its time to be imported

    if shard_bytes < 1:
        raise UsageError(f"shard_bytes must be at least 1; got {shard_bytes}")
    with new_folder(Path(folder)) as saving:
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


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which has its name when all is written; what is left of a failure is removed."""
    check_new(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    saving = folder.with_name(f".{folder.name}.covpool-saving-{secrets.token_hex(4)}")
    saving.mkdir()
    try:
        yield saving
        os.replace(saving, folder)
    finally:
        shutil.rmtree(saving, ignore_errors=True)


def check_new(folder: Path) -> None:
    """Raise if there is something at the place of a folder that is to be written."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists: shards are written into a new folder")


def _sample(images: ImageSet, i: int, position: int) -> dict[str, str | bytes]:
    """A sample as webdataset writes it. Everything is bytes already, so it encodes nothing."""
    name, label = images.name(i), images.label(i)
    extension = PurePosixPath(name).suffix[1:].lower()
    told = json.dumps({"name": name, "class": images.classes[label]})
    return {
        "__key__": f"{position:09d}",
        extension if extension in IMAGE_FIELDS else "img": images.read(i),
        "cls": str(label).encode(),
        "json": told.encode(),
    }


class _Stream:
    """The file of the shard being written, which webdataset opens and leaves open."""

    def __init__(self) -> None:
        self._file: BinaryIO | None = None

    def open(self, name: str) -> BinaryIO:
        self._file = open(name, "xb")  # noqa: SIM115  closed when the shard is finished
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
