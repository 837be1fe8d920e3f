"""From images' bytes to a batch of pixels: what worker processes do."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from covpool.data.decode import BadImageError, decode
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.evaluate.bulk.inputs.passing import cannot_go_on
from covpool.evaluate.bulk.units import UnlabelledImages

Batch = dict[str, Any]


class Decoder:
    """Makes pixels of bytes as a network's evaluation does, up to where values become floats.

    Pixels stay bytes on their way from process to process, a quarter of what floats would take.

    Args:
        preprocessing: what the network wants.
    """

    def __init__(self, preprocessing: Preprocessing) -> None:
        self.size = preprocessing.size
        *pixels, self.to_float, self.normalize = evaluation_transform(preprocessing).transforms
        self.pixels = v2.Compose(pixels)

    def __call__(self, data: bytes) -> Tensor:
        """Bytes of a file to ``(3, size, size)`` from 0 to 255.

        Raises:
            BadImageError: with what is wrong with it.
        """
        pixels: Tensor = self.pixels(decode(data))
        return pixels

    def floats(self, pixels_B3HW: Tensor) -> Tensor:
        """What the network receives."""
        images: Tensor = self.normalize(self.to_float(pixels_B3HW))
        return images

    def batch(self, images: UnlabelledImages, numbers: range) -> Batch:
        """Columns ``id``, ``image`` and ``error``, a row an image; of a bad one the pixels are zeros.

        Raises:
            ShardError: where nothing can be read any more.
        """
        pixels = torch.zeros(len(numbers), 3, self.size, self.size, dtype=torch.uint8)
        ids = np.empty(len(numbers), dtype=object)
        errors = np.full(len(numbers), "", dtype=object)
        for row, i in enumerate(numbers):
            ids[row] = _id(images, i)
            try:
                pixels[row] = self(images.read(i))
            except BadImageError as error:
                errors[row] = f"{error.reason}: {error}"
            except OSError as error:
                errors[row] = f"unreadable: {error.strerror or error}"
        return {"id": ids, "image": pixels, "error": errors}


def _id(images: UnlabelledImages, i: int) -> str:
    """An image's name. Where it is in a file with others, that file may be gone."""
    try:
        name = images.name(i)
    except OSError as error:
        raise cannot_go_on(error.filename or f"image {i}", error) from error
    # The bytes of a file's name need not be UTF-8, those of a text in a table must.
    return name.encode("utf-8", "backslashreplace").decode()
