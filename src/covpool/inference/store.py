"""Cache features on disk and resume after an interruption."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from covpool.data.decode import decode
from covpool.data.image_set import ImageSet
from covpool.data.shards.reader import ShardSet
from covpool.durable import replace_file, sync_folder
from covpool.errors import BadImageError, UsageError

Progress = Callable[[int, int], None]

# In the place of a digest.
UNREADABLE = bytes(hashlib.sha256().digest_size)


class Content(NamedTuple):
    """What was found when all images were read.

    Attributes:
        digest: of all names, labels and bytes, in order.
        images: the digests of each image's bytes, one after the other, zeros where they could not be read;
            nothing of shards, which are not read for it.
    """

    digest: str
    images: bytes


def read_content(images: ImageSet, progress: Progress) -> Content:
    """Read all images. Shards have digests of their own, so they are not read."""
    if isinstance(images, ShardSet):
        return Content(images.fingerprint(), b"")
    digest, each = hashlib.sha256(repr(images.classes).encode("utf-8", "surrogateescape")), bytearray()
    for i in range(len(images)):
        label = images.label(i)
        digest.update(f"{images.name(i)}\0{label}\0".encode("utf-8", "surrogateescape"))
        try:
            one = hashlib.sha256(images.read(i)).digest()
            digest.update(one)
        except (OSError, ValueError) as error:  # such an image has no features either
            one = UNREADABLE
            digest.update(type(error).__name__.encode())
        each += one
        progress(i + 1, len(images))
    return Content(digest.hexdigest(), bytes(each))


def check_lasting(images: ImageSet, bad: Iterable[int], content: Content) -> None:
    """Raise unless images that were found bad are so by the bytes that were read before.

    What is kept is known by these bytes, so an image that a disk or a network failed to give once would be
    missing from it ever after. Of shards nothing is known, and nothing is said.

    Args:
        images: the set.
        bad: numbers of images that have no features.
        content: of the set.

    Raises:
        ValueError: for one that is no bad image.
    """
    for i in bad if content.images else ():
        before = content.images[i * len(UNREADABLE) : (i + 1) * len(UNREADABLE)]
        try:
            data = images.read(i)
            if hashlib.sha256(data).digest() != before:
                why = "it has changed"
            else:
                decode(data)
                why = "it can be again"
        except BadImageError:
            continue
        except OSError as error:
            if before == UNREADABLE:
                continue
            why = error.strerror or str(error)
        raise UsageError(
            f"{images.name(i)} was there a while ago, and then could not be read ({why}): nothing of it is "
            "kept, and the same command goes on"
        )


STATE = "state.json"
# An image, and its mirror.
VIEWS = 2

Array = np.memmap[Any, np.dtype[np.float16]]


def nothing_done() -> dict[str, Any]:
    """How far an array is that has no features yet; a list of its own for every caller to add to."""
    return {"done": 0, "bad": [], "seconds": 0.0}


class Shapes(NamedTuple):
    """Of what is kept of one view of an image.

    Attributes:
        features: as the backbone gives them; ``None`` where no head needs them.
        average: the channels of their average, after the expansion.
        token: the channels of the class token; ``None`` without one.
    """

    features: tuple[int, ...] | None
    average: int
    token: int | None

    def of_arrays(self) -> dict[str, tuple[int, ...]]:
        """By name, of those that there are."""
        found: dict[str, tuple[int, ...] | None] = {
            "features": self.features,
            "average": (self.average,),
            "token": None if self.token is None else (self.token,),
        }
        return {name: shape for name, shape in found.items() if shape is not None}

    def bytes(self, images: int) -> int:
        """What so many images take, with their mirrors."""
        return VIEWS * images * 2 * sum(int(np.prod(shape)) for shape in self.of_arrays().values())


@dataclass(frozen=True, eq=False)
class CachedFeatures:
    """The features of a set.

    Attributes:
        arrays: ``(views, images, ...)`` in float16, on disk, by the names of :class:`Shapes`.
        labels: of every image.
        usable: the numbers of the images that have features; the others could not be read.
        seconds: that it took to compute them.
    """

    arrays: dict[str, NDArray[np.float16]]
    labels: NDArray[np.int64]
    usable: NDArray[np.int64]
    seconds: float


class CacheFolder:
    """Where the features of one set are, or will be.

    Args:
        path: the folder; its name is the digest of what the features depend on.
        images: how many there are.
        shapes: of what is wanted of each.
    """

    def __init__(self, path: Path, images: int, shapes: Shapes) -> None:
        self.path, self.images, self.shapes = path, images, shapes

    def state(self) -> dict[str, Any]:
        """How far all that is wanted is: images done, those that could not be read, seconds."""
        states = self.states().values()
        return {
            "done": min(state["done"] for state in states),
            "bad": sorted({i for state in states for i in state["bad"]}),
            "seconds": max(state["seconds"] for state in states),  # arrays are filled together
        }

    def states(self) -> dict[str, dict[str, Any]]:
        """How far each array that is wanted is; one that is to be made has nothing done."""
        written, to_be_made = self._written(), self._to_be_made()
        return {
            name: nothing_done() if name in to_be_made else written.get(name, nothing_done())
            for name in self._wanted()
        }

    def write_states(self, states: dict[str, dict[str, Any]]) -> None:
        """Of some arrays, in one move, once the features they speak of are on disk; others' stay."""
        replace_file(self.path / STATE, json.dumps(self._written() | states).encode())

    def missing_bytes(self) -> int:
        """What is not on the disk yet."""
        return sum(2 * int(np.prod(shape)) for shape in self._to_be_made().values())

    def begin(self) -> None:
        """Make what is not there, in its whole size: a disk that is full says so now."""
        to_be_made = self._to_be_made()
        # Before: a kill must not leave a new array with the state of an old one.
        self.write_states({name: nothing_done() for name in to_be_made})
        for name, shape in to_be_made.items():
            self._make(name, shape)
        sync_folder(self.path)

    def array(self, name: str, mode: Literal["r", "r+"] = "r") -> Array:
        """On disk."""
        return np.lib.format.open_memmap(self._file(name), mode)

    def opened(self, labels: NDArray[np.int64]) -> CachedFeatures:
        """What is in it, once it is complete."""
        state = self.state()
        usable = np.setdiff1d(np.arange(self.images), np.asarray(state["bad"], dtype=np.int64))
        arrays: dict[str, NDArray[np.float16]] = {name: self.array(name) for name in self._wanted()}
        return CachedFeatures(arrays, labels, usable, state["seconds"])

    def _written(self) -> dict[str, dict[str, Any]]:
        """The states of all arrays, also of those that are not wanted now."""
        try:
            written: dict[str, dict[str, Any]] = json.loads((self.path / STATE).read_text())
        except (OSError, ValueError):
            return {}
        return written

    def _to_be_made(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the arrays that are not there, or are not what they should be."""
        return {name: shape for name, shape in self._wanted().items() if not self._is_there(name, shape)}

    def _is_there(self, name: str, shape: tuple[int, ...]) -> bool:
        try:
            array = self.array(name)
        except (OSError, ValueError):
            return False
        return array.shape == shape and array.dtype == np.float16

    def _make(self, name: str, shape: tuple[int, ...]) -> None:
        """By another name first: what other processes have opened stays as it is."""
        new = self.path / f".{name}.npy.covpool-making"
        try:
            np.lib.format.open_memmap(new, "w+", np.float16, shape).flush()
            with open(new, "r+b") as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
            os.replace(new, self._file(name))
        finally:
            new.unlink(missing_ok=True)

    def _wanted(self) -> dict[str, tuple[int, ...]]:
        return {name: (VIEWS, self.images, *shape) for name, shape in self.shapes.of_arrays().items()}

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.npy"


class Filling:
    """Those that lack images, together, from the first that any of them lacks; whole ones are left alone.

    Args:
        folder: where the arrays are.

    Attributes:
        first: the number of the first image that is wanted.
    """

    def __init__(self, folder: CacheFolder) -> None:
        self.first = folder.state()["done"]
        self._folder, self._since = folder, time.monotonic()
        self._before = {
            name: state for name, state in folder.states().items() if state["done"] < folder.images
        }
        self._arrays = {name: folder.array(name, "r+") for name in self._before}

    def put(self, ids: NDArray[np.int64], values: dict[str, NDArray[np.float16]]) -> None:
        """What was computed of some images, ``(views, images, ...)`` by name."""
        for name, array in self._arrays.items():
            array[:, ids] = values[name]

    def save(self, done: int, bad: list[int]) -> None:
        """Bring it to the disk, and then write down how far it is.

        Args:
            done: the images up to here have their features.
            bad: those from the first on that have none, as they could not be read.
        """
        for array in self._arrays.values():
            array.flush()
        seconds = time.monotonic() - self._since
        self._folder.write_states(
            {
                name: {
                    "done": done,
                    "bad": [i for i in before["bad"] if i < self.first] + bad,
                    "seconds": before["seconds"] + seconds,
                }
                for name, before in self._before.items()
            }
        )
