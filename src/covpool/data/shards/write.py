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

# Small images would otherwise make shards of a hundred thousand, and windows of millions.
MAX_SAMPLES = 10_000


def write_shards(
    images: ImageSet,
    folder: str | Path,
    *,
    shard_bytes: int = 256_000_000,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> ShardIndex:
    """Write a set into tar shards and their index. The bytes of the images are kept as they are.

    Samples are written in random order: within a window of shards there should be all classes, and a folder
    has them one after the other. The same set and seed give the same tars to the bit.

    Args:
        images: the set.
        folder: to write; it must not exist, or be empty. It appears when all is written.
        shard_bytes: the size at which a shard is closed.
        seed: of the order in the shards.
        progress: called after each image, with the number written so far.
    """
    import webdataset  # here, because it takes its time to be imported

    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists: shards are written into a new folder")
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
                    progress(written + 1)
        index = ShardIndex(tuple(images.classes), tuple(shards))
        _write_file(saving / INDEX, write_index(index))
        os.replace(saving, folder)
    finally:
        shutil.rmtree(saving, ignore_errors=True)
    return index


def index_shards(folder: str | Path, classes: Sequence[str] | None = None) -> tuple[ShardIndex, int]:
    """Make the index of a folder of tars, ours or others', anew. The tars are only read.

    Args:
        folder: with the tars; the index goes beside them.
        classes: names, in the order of the labels; if not given, those in the tars, or else the labels.

    Returns:
        The index, and how many samples were left out because they have no image or no label.
    """
    folder = Path(folder)
    names = sorted(path.name for path in folder.iterdir() if path.suffix == ".tar")
    if not names:
        packed = sorted(
            path.name for path in folder.iterdir() if ".tar." in path.name or path.suffix == ".tgz"
        )
        also = f" ({packed[0]} is compressed: unpack it first)" if packed else ""
        raise ShardError(f"{folder} has no tars{also}")
    found = [_index_one(folder, name) for name in names]
    told = class_names([scan for _, scan in found])
    if classes is not None and len(classes) < len(told):
        raise ShardError(
            f"{folder} has labels up to {len(told) - 1}, and there are {len(classes)} classes' names"
        )
    index = ShardIndex(told if classes is None else tuple(classes), tuple(shard for shard, _ in found))
    _write_file(folder / INDEX, write_index(index))
    return index, sum(scan.left_out for _, scan in found)


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
