"""Shards from a set of images, written by webdataset, so that anything that reads WebDataset reads them."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from covpool.data.image_set import ImageSet
from covpool.data.randomness import permutation
from covpool.data.shards.index import (
    INDEX,
    Shard,
    ShardError,
    ShardIndex,
    digest,
    write_contents,
    write_index,
)
from covpool.data.shards.scan import IMAGE_FIELDS, Scan, class_names, scan_tar
from covpool.data.sources.listing import SPLITS

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

    folder = Path(folder)
    check_new(folder)
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes must be at least 1; got {shard_bytes}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    saving = folder.with_name(f".{folder.name}.covpool-saving-{secrets.token_hex(4)}")
    saving.mkdir()
    try:
        shards, stream = [], _Stream()

        def finish(name: str) -> None:
            stream.close()
            shards.append(_index_one(saving, os.path.basename(name))[0])

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
            for written, i in enumerate(permutation(len(images), "write", seed).tolist()):
                writer.write(_sample(images, i, written))
                if progress is not None:
                    progress(written + 1, len(images))
        index = ShardIndex(tuple(images.classes), tuple(shards))
        _write_file(saving / INDEX, write_index(index))
        os.replace(saving, folder)
    finally:
        shutil.rmtree(saving, ignore_errors=True)
    return index


def check_new(folder: Path) -> None:
    """Raise if there is something at the place of a folder that is to be written."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists: shards are written into a new folder")


def index_shards(
    folders: Sequence[Path], classes: Sequence[str] | None = None
) -> tuple[list[ShardIndex], int]:
    """Make the index of folders of tars, ours or others', anew. The tars are only read.

    Args:
        folders: with the tars; the index of each goes beside them. They have the same classes.
        classes: names, in the order of the labels; if not given, those in the tars, or else the labels.

    Returns:
        The index of each, and how many samples were left out because they have no image or no label.
    """
    found = [[_index_one(folder, name) for name in _tars(folder)] for folder in folders]
    scans = [scan for folder in found for _, scan in folder]
    told = class_names(scans)
    if classes is not None and len(classes) < len(told):
        raise ShardError(f"there are {len(classes)} names of classes, and labels up to {len(told) - 1}")
    indexes = []
    for folder, indexed in zip(folders, found, strict=True):
        index = ShardIndex(tuple(classes or told), tuple(shard for shard, _ in indexed))
        _write_file(folder / INDEX, write_index(index))
        indexes.append(index)
    return indexes, sum(scan.left_out for scan in scans)


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


def _sample(images: ImageSet, i: int, position: int) -> dict[str, str | bytes]:
    """A sample as webdataset writes it. Everything is bytes already, so it encodes nothing."""
    name, label = images.name(i), int(images.labels[i])
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


def _index_one(folder: Path, name: str) -> tuple[Shard, Scan]:
    """Scan a tar and write what is in it beside it."""
    scan = scan_tar(folder / name)
    data = write_contents(scan.contents)
    _write_file(folder / f"{name}.json", data)
    return Shard(name, (folder / name).stat().st_size, len(scan.contents.names), digest(data)), scan


def _write_file(path: Path, data: bytes) -> None:
    """Write a file that takes its name when it is whole."""
    saving = path.with_name(f".{path.name}.covpool-saving")
    try:
        with saving.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(saving, path)
    finally:
        saving.unlink(missing_ok=True)
