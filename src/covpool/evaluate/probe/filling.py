"""The arrays of a folder of features that lack images, while they are filled."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from covpool.evaluate.probe.cache import CacheFolder


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
