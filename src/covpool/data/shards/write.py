"""Shards from a set of images, written by webdataset, so that anything that reads WebDataset reads them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from covpool.data.image_set import ImageSet
from covpool.data.randomness import permutation
from covpool.data.shards.index import Shard, ShardIndex
from covpool.data.shards.indexing import index_tar, save_index
from covpool.data.shards.scan import IMAGE_FIELDS

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
        raise ValueError(f"shard_bytes must be at least 1; got {shard_bytes}")
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
        raise ValueError(f"{folder} exists: shards are written into a new folder")


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
