"""A dataset in memory, small enough to create in every test."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from covpool.data.image_set import BaseSet


@dataclass(frozen=True)
class MemoryImages(BaseSet):
    """Encoded images with names and labels."""

    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    names: Sequence[str]
    files: Sequence[bytes]

    def __len__(self) -> int:
        return len(self.files)

    def name(self, i: int) -> str:
        return self.names[i]

    def read(self, i: int) -> bytes:
        return self.files[i]


def encoded(number: int, side: int = 24, kind: str = "PNG") -> bytes:
    """Return an image whose first pixel encodes its number."""
    pixels = np.random.default_rng(number).integers(0, 256, (side, side + number % 5, 3), dtype=np.uint8)
    pixels[0, 0] = number % 256, number // 256 % 256, 7
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


def memory_images(count: int = 20, classes: int = 3, side: int = 24) -> MemoryImages:
    """Return ``count`` images, sorted by class as in a folder."""
    labels = np.arange(count) * classes // count
    names = [f"{'abcdefgh'[label]}/{i:03d}.png" for i, label in enumerate(labels)]
    files = [encoded(i, side) for i in range(count)]
    return MemoryImages(tuple("abcdefgh"[:classes]), labels, names, files)
