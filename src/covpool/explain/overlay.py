"""A map over places as colours on the image: what speaks for a class in one, what against it in another."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from covpool.data.transforms import Preprocessing

# For and against: told apart with any colour vision, and on photographs.
FOR, AGAINST = (255, 122, 0), (0, 110, 255)
# The most that colour covers, and the grey that the photograph is faded to: colours are the map's alone.
COVER, FADE = 0.75, 0.85


def seen(image: Tensor, preprocessing: Preprocessing) -> Image.Image:
    """A preprocessed image ``(3, H, W)`` as the picture that the network saw."""
    mean, std = np.array(preprocessing.mean), np.array(preprocessing.std)
    pixels = image.detach().cpu().numpy().transpose(1, 2, 0) * std + mean
    return Image.fromarray((pixels.clip(0, 1) * 255).round().astype(np.uint8))


def overlay(picture: Image.Image, places: Tensor, largest: float | None = None) -> Image.Image:
    """The picture in grey under a map.

    Args:
        picture: what the network saw.
        places: ``(h, w)``.
        largest: the value, positive or negative, that is covered most; the map's own if not given. The same
            for several maps makes them comparable.
    """
    map_hw: NDArray[np.float32] = places.detach().cpu().float().numpy()
    largest = float(np.abs(map_hw).max()) if largest is None else largest
    share = resized(map_hw / (largest or 1.0), picture.size).clip(-1, 1)
    grey = np.asarray(picture.convert("L").convert("RGB"), dtype=np.float32)
    base = 255 * (1 - FADE) + grey * FADE
    colour = np.where(share[..., None] > 0, np.array(FOR), np.array(AGAINST))
    cover = COVER * np.abs(share)[..., None]
    return Image.fromarray((base * (1 - cover) + colour * cover).round().clip(0, 255).astype(np.uint8))


def resized(map_hw: NDArray[Any], size: tuple[int, int]) -> NDArray[np.float32]:
    """A map at the size of a picture, smooth between places; bicubic would overshoot."""
    smooth = Image.fromarray(map_hw.astype(np.float32)).resize(size, Image.Resampling.BILINEAR)
    return np.asarray(smooth, dtype=np.float32)
