"""Features of a set on disk: made once, resumed after a kill, and reused.

A folder of three files: ``features.npy``, with rows 2i and 2i+1 for image i and its mirror image;
``labels.npy``, the class of each image, -1 where it could not be used; and ``features.json``, which says of
what the features are and how far they got. It is replaced in one move, after what it tells of has reached the
disk, so whatever is not told of is made anew.
"""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covpool.data.batch import BadImage
from covpool.data.image_set import ImageSet, Subset
from covpool.durable.replacing import replace_file
from covpool.evaluate.content import Content, check_lasting
from covpool.evaluate.lock import LOCK
from covpool.evaluate.passes import Pass
from covpool.evaluate.svm.rows import ITEM, RowFile
from covpool.evaluate.svm.streaming import left_behind
from covpool.evaluate.svm.views import VIEWS, Views, views
from covpool.models.model import PooledClassifier
from covpool.models.planning.text import human
from covpool.train.processes import Processes

# Seconds of work that a kill loses at most.
BETWEEN_SAVES = 30.0

Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Features:
    """Of a whole set.

    Attributes:
        rows: two for each image.
        labels: of the images, -1 where one could not be used.
        bad: those.
    """

    rows: RowFile
    labels: NDArray[np.int32]
    bad: list[BadImage]

    def samples(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The numbers of the rows that have features, and their classes."""
        labels = np.repeat(self.labels, VIEWS).astype(np.int64)
        numbers = np.flatnonzero(labels >= 0)
        return numbers, labels[numbers]


def store_bytes(images: int, columns: int) -> int:
    """The size of the features of so many images."""
    return VIEWS * ITEM * images * columns


def make_features(
    folder: Path,
    key: dict[str, Any],
    model: PooledClassifier,
    images: ImageSet,
    content: Content,
    passing: Pass,
    processes: Processes,
    *,
    tell: Callable[[str], None],
    progress: Progress,
) -> Features:
    """The features of all images: those in the folder if they are of this key, and made if not.

    Args:
        folder: for the three files alone, held by the caller.
        key: what the features depend on, as JSON has it.
        model: that makes them.
        images: of which.
        content: of the images.
        passing: how.
        processes: this one, on its device.
        tell: is given the size, before anything is made.
        progress: is given the number of images done, and of all.

    Raises:
        ValueError: if room is short, the folder has other things in it, or features are not finite.
    """
    columns = model.head_hidden_size
    done, bad = _begun(folder, key, (VIEWS * len(images), columns))
    if done is None:
        alphas = store_bytes(len(images), len(images.classes))  # of the streaming solver, as many rows
        _make_room(folder, store_bytes(len(images), columns), alphas, tell)
        RowFile.create(folder / "features.npy", VIEWS * len(images), columns)
        np.save(folder / "labels.npy", np.full(len(images), -1, dtype=np.int32))
        done = 0
        _save(folder, key, done, bad)
    store = RowFile(folder / "features.npy")
    labels = np.load(folder / "labels.npy")
    labels[done:] = -1
    saved = time.monotonic()
    first, part = done, Subset(images, np.arange(done, len(images)))
    for made in views(model, part, passing, processes) if done < len(images) else ():
        before, done = done, min(done + passing.batch_size, len(images))
        if made.bad:
            missing = set(range(before, done)) - set((made.ids + first).tolist())
            check_lasting(images, sorted(missing), content)
        bad += made.bad
        _put(store, labels, made, first)
        progress(done, len(images))
        if time.monotonic() - saved > BETWEEN_SAVES or done == len(images):
            store.sync()
            replace_file(folder / "labels.npy", _npy(labels))
            _save(folder, key, done, bad)
            saved = time.monotonic()
    return Features(store, labels, bad)


def _put(store: RowFile, labels: NDArray[np.int32], made: Views, first: int) -> None:
    if not len(made.ids):
        return
    ids = made.ids.numpy() + first
    labels[ids] = made.labels.numpy()
    for view in range(VIEWS):
        store.write(VIEWS * ids + view, made.features[:, view].numpy())


def _begun(folder: Path, key: dict[str, Any], shape: tuple[int, int]) -> tuple[int | None, list[BadImage]]:
    """How many images are done, ``None`` where there is nothing of this key, and the bad ones among them."""
    try:
        told = json.loads((folder / "features.json").read_text(encoding="utf-8"))
        if told["key"] == json.loads(json.dumps(key)) and _is_there(folder, shape):
            return int(told["done"]), [BadImage(*image) for image in told["bad"]]
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # none, or no such file
        pass
    return None, []


def _is_there(folder: Path, shape: tuple[int, int]) -> bool:
    """Whether both arrays are, in their sizes: the large one is what people delete."""
    try:
        rows = np.load(folder / "features.npy", mmap_mode="r")
        labels = np.load(folder / "labels.npy", mmap_mode="r")
    except (OSError, ValueError):
        return False
    return bool(rows.shape == shape and labels.shape == (shape[0] // VIEWS,))


def _make_room(folder: Path, size: int, beside: int, tell: Callable[[str], None]) -> None:
    """An empty folder on a disk with room for features, and for what a solver keeps beside them.

    Raises:
        ValueError: if there is too little, or the folder has other things in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ours = {"features.npy", "labels.npy", "features.json"}
    left = left_behind(folder)
    known = ours | {LOCK} | {path.name for path in left}
    if others := sorted(path.name for path in folder.iterdir() if path.name not in known):
        raise ValueError(f"{folder} holds other things, such as {others[0]!r}: give a new folder")
    for name in sorted(ours):  # features.json first: it must not outlive what it tells of
        (folder / name).unlink(missing_ok=True)
    for path in left:
        shutil.rmtree(path)
    free = shutil.disk_usage(folder).free
    tell(f"features take {human(size, 'B')} in {folder}")
    if size + beside > free:
        raise ValueError(
            f"features take {human(size, 'B')} and their SVMs up to {human(beside, 'B')}, "
            f"and {folder} has {human(free, 'B')} free: give another folder"
        )


def _save(folder: Path, key: dict[str, Any], done: int, bad: list[BadImage]) -> None:
    told = {"key": key, "done": done, "bad": bad}
    replace_file(folder / "features.json", json.dumps(told, indent=1).encode())


def _npy(array: NDArray[np.int32]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()
