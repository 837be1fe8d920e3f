"""Features on disk: computed once, in float16, for every image and its mirror.

A folder of its own for every set of images, network and preprocessing, named by a digest of the three. What a
kill leaves behind is gone on with; what is damaged or of others is never used, for it has another name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from covpool.models.bundles.durable import replace_file

STATE = "state.json"
# An image, and its mirror.
VIEWS = 2


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
        path: the folder.
        images: how many there are.
        shapes: of what is kept of each.
    """

    def __init__(self, path: Path, images: int, shapes: Shapes) -> None:
        self.path, self.images, self.shapes = path, images, shapes

    def state(self) -> dict[str, Any]:
        """How far it is: images done, those that could not be read, seconds."""
        try:
            state: dict[str, Any] = json.loads((self.path / STATE).read_text())
        except (OSError, ValueError):
            return {"done": 0, "bad": [], "seconds": 0.0}
        return state

    def write_state(self, state: dict[str, Any]) -> None:
        """In one move, once the features it speaks of are on disk."""
        replace_file(self.path / STATE, json.dumps(state).encode())

    def begin(self) -> None:
        """Make what is not there."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not (self.path / STATE).exists():
            for name, shape in self.shapes.of_arrays().items():
                np.lib.format.open_memmap(
                    self._file(name), "w+", np.float16, (VIEWS, self.images, *shape)
                ).flush()

    def arrays(self, mode: Literal["r", "r+"] = "r") -> dict[str, NDArray[np.float16]]:
        """On disk, by name."""
        return {name: np.load(self._file(name), mmap_mode=mode) for name in self.shapes.of_arrays()}

    def opened(self, labels: NDArray[np.int64]) -> CachedFeatures:
        """What is in it, once it is complete."""
        state = self.state()
        usable = np.setdiff1d(np.arange(self.images), np.asarray(state["bad"], dtype=np.int64))
        return CachedFeatures(self.arrays(), labels, usable, state["seconds"])

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.npy"
