"""Features on disk: computed once, in float16, for every image and its mirror.

A folder of its own for every set of images, network and preprocessing, named by a digest of the three, so
that those of others are never used. What a kill leaves behind is gone on with; arrays that are cut short or
missing are made anew. What a disk does to bytes later is not noticed.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from covpool.models.bundles.durable import replace_file

STATE = "state.json"
# An image, and its mirror.
VIEWS = 2


def nothing_done() -> dict[str, Any]:
    """How far a folder is that has no features yet; a list of its own for every caller to add to."""
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
        """How far it is: images done, those that could not be read, seconds.

        Where an array that is wanted is not there, or is not what it should be, nothing is done.
        """
        try:
            state: dict[str, Any] = json.loads((self.path / STATE).read_text())
            arrays = self.arrays()
        except (OSError, ValueError):
            return nothing_done()
        whole = all(arrays[name].shape == shape for name, shape in self._wanted().items())
        return state if whole and all(one.dtype == np.float16 for one in arrays.values()) else nothing_done()

    def write_state(self, state: dict[str, Any]) -> None:
        """In one move, once the features it speaks of are on disk."""
        replace_file(self.path / STATE, json.dumps(state).encode())

    def missing_bytes(self) -> int:
        """What is not on the disk yet."""
        return self.shapes.bytes(self.images) if self._is_to_be_made() else 0

    def begin(self) -> None:
        """Make what is not there, in its whole size: a disk that is full says so now."""
        if not self._is_to_be_made():
            return
        (self.path / STATE).unlink(missing_ok=True)
        for name, shape in self._wanted().items():
            np.lib.format.open_memmap(self._file(name), "w+", np.float16, shape).flush()
            with open(self._file(name), "r+b") as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        self.write_state(nothing_done())

    def arrays(self, mode: Literal["r", "r+"] = "r") -> dict[str, NDArray[np.float16]]:
        """On disk, by name."""
        return {name: np.load(self._file(name), mmap_mode=mode) for name in self._wanted()}

    def opened(self, labels: NDArray[np.int64]) -> CachedFeatures:
        """What is in it, once it is complete."""
        state = self.state()
        usable = np.setdiff1d(np.arange(self.images), np.asarray(state["bad"], dtype=np.int64))
        return CachedFeatures(self.arrays(), labels, usable, state["seconds"])

    def _is_to_be_made(self) -> bool:
        return not (self.path / STATE).exists() or self.state() == nothing_done()

    def _wanted(self) -> dict[str, tuple[int, ...]]:
        return {name: (VIEWS, self.images, *shape) for name, shape in self.shapes.of_arrays().items()}

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.npy"
