"""An example of a contributed source: a folder with ``images.npy`` and ``labels.npy``."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from covpool.data.image_set import BaseSet, ImageSet
from covpool.data.sources import Marks, Split

MARKS = Marks(files=("images.npy",))


def open_splits(path: str, cache: str | None = None) -> Mapping[Split, ImageSet]:
    images, labels = (np.load(os.path.join(path, f"{name}.npy")) for name in ("images", "labels"))
    is_test = np.arange(len(images)) % 3 == 0
    return {
        "train": NpyImages(("dark", "light"), labels[~is_test], images[~is_test], "train"),
        "test": NpyImages(("dark", "light"), labels[is_test], images[is_test], "test"),
    }


def open_unlabeled(path: str) -> ImageSet:
    return NpyImages((), None, np.load(os.path.join(path, "images.npy")), "all")


@dataclass(frozen=True)
class NpyImages(BaseSet):
    classes: tuple[str, ...]
    labels: NDArray[np.int64] | None
    pixels: NDArray[np.uint8]
    split: str

    def __len__(self) -> int:
        return len(self.pixels)

    def name(self, i: int) -> str:
        return f"{self.split}/{i}"

    def read(self, i: int) -> bytes:
        stream = io.BytesIO()
        Image.fromarray(self.pixels[i]).save(stream, "PNG")
        return stream.getvalue()
