"""Features for the SVMs, stored on disk."""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covpool.data.batch import BadImage, Batch
from covpool.data.image_set import ImageSet, Subset
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.device import autocast
from covpool.durable import LOCK, replace_file
from covpool.errors import UsageError
from covpool.evaluate.svm.solvers import ITEM, RowFile, left_behind
from covpool.functional.arguments import check_choice
from covpool.inference.forward import Pass, channels_last
from covpool.inference.store import Content, check_lasting
from covpool.models.head import unit
from covpool.models.model import PooledClassifier
from covpool.processes import Processes
from covpool.wording import human

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Passing:
    """A pass, with what is usual where nothing is said, and the device.

    Attributes:
        batch_size: images at a time; their mirror images come on top.
        workers: processes that load images.
        precision: of autocast: ``"float32"`` or ``"bfloat16"``.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"`` for a GPU if there is one.
    """

    batch_size: int = 32
    workers: int = 0
    precision: Precision = "float32"
    device: str = "auto"

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, ("float32", "bfloat16"))
        check_choice("device", self.device, ("auto", "cpu", "cuda"))
        self.made()

    def made(self) -> Pass:
        """The pass; how far it is, is told by whoever uses its batches."""
        return Pass(self.batch_size, self.workers, self.precision, progress=None)


VIEWS = 2


@dataclass(frozen=True, eq=False)
class Views:
    """Of a batch.

    Attributes:
        ids: ``(B,)``, the images' numbers in the set.
        labels: ``(B,)``.
        features: ``(B, 2, v)``: of each image and its mirror image, what the classifier receives, of length
            one; of a joined model, each of the two parts of length one.
        logits: ``(B, 2, k)``, of the network's own classifier; ``None`` where it has none.
        bad: images that could not be used.
    """

    ids: Tensor
    labels: Tensor
    features: Tensor
    logits: Tensor | None
    bad: list[BadImage]


def views(model: PooledClassifier, images: ImageSet, passing: Pass, processes: Processes) -> Iterator[Views]:
    """Both views of every image of a set that can be used, in its order.

    Raises:
        ValueError: where the network's numbers are not finite.
    """
    model = model.eval().to(processes.device)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
    for batch in passing.batches(images, transform, processes):
        made = _views(model, batch, passing.precision, processes.device)
        _check_finite(made, images, passing.precision)
        yield made


def _check_finite(made: Views, images: ImageSet, precision: str) -> None:
    """At the first such batch: what follows would be of no use."""
    for what, numbers in (("features", made.features), ("logits", made.logits)):
        if numbers is None or not len(made.ids):
            continue
        wrong = made.ids[~numbers.isfinite().flatten(1).all(dim=1)]
        if len(wrong):
            raise UsageError(
                f"the {what} of {len(wrong)} images of a batch are not finite in {precision}, first of "
                f"{images.name(int(wrong[0]))}: try --precision float32, or train anew"
            )


@torch.inference_mode()
def _views(model: PooledClassifier, batch: Batch, precision: str, device: torch.device) -> Views:
    if not len(batch.ids):
        return Views(batch.ids, batch.labels, torch.empty(0), None, list(batch.bad))
    both = channels_last(torch.cat([batch.images, batch.images.flip(-1)]).to(device, non_blocking=True))
    with autocast(device, precision):
        maps = model.forward_features(both)
        vector, first = model.forward_pool(maps), model.forward_first_order(maps)
        received = model.classify(vector, first, pre_logits=True)
        logits = model.classify(vector, first) if model.num_classes else None
    return Views(
        ids=batch.ids,
        labels=batch.labels,
        features=_by_image(unit_parts(model, received)),
        logits=None if logits is None else _by_image(logits),
        bad=list(batch.bad),
    )


def unit_parts(model: PooledClassifier, received: Tensor) -> Tensor:
    """What the second-order and, if there is one, the first-order classifier receives, each of length one."""
    second = model.head.hidden_size
    parts = [received[:, :second], received[:, second:]]
    return torch.cat([unit(part.float()) for part in parts if part.shape[1]], dim=1)


def _by_image(x: Tensor) -> Tensor:
    """All images and then all mirror images, as pairs."""
    pairs: Tensor = x.float().cpu().unflatten(0, (VIEWS, -1)).transpose(0, 1)
    return pairs


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
        raise UsageError(f"{folder} holds other things, such as {others[0]!r}: give a new folder")
    for name in sorted(ours):  # features.json first: it must not outlive what it tells of
        (folder / name).unlink(missing_ok=True)
    for path in left:
        shutil.rmtree(path)
    free = shutil.disk_usage(folder).free
    tell(f"features take {human(size, 'B')} in {folder}")
    if size + beside > free:
        raise UsageError(
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
