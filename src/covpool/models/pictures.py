"""The images that ``model.predict`` accepts: files, images of Pillow, arrays and tensors, one or several."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covpool.errors import UsageError, UsageTypeError

if TYPE_CHECKING:
    from PIL.Image import Image

LOGGER = logging.getLogger("covpool")
# Channels of an image: gray, RGB, RGB with transparency.
CHANNELS = (1, 3, 4)


def listed(images: Any) -> tuple[list[Any], bool]:
    """Return images as a list, and whether there may be several: a list, or a batch in one array."""
    if isinstance(images, np.ndarray | Tensor):
        return (list(images), True) if images.ndim == 4 else ([images], False)
    if isinstance(images, Sequence) and not isinstance(images, str):
        return list(cast(Sequence[Any], images)), True
    return [images], False


def opened(image: Any) -> Image | Tensor:
    """Return an image in RGB and upright, or as a tensor that is preprocessed already.

    Args:
        image: a path, an image of Pillow, or an array or a tensor: (H, W, 3), (3, H, W) or (H, W).

    Raises:
        BadImageError: if a file cannot be read.
        UsageError: if an array has another shape.
    """
    from PIL import Image, ImageOps

    from covpool.data.decode import decode, to_rgb
    from covpool.storage.address import read_image

    if isinstance(image, str | os.PathLike):
        return decode(read_image(os.fspath(image)))
    if isinstance(image, Image.Image):
        return to_rgb(ImageOps.exif_transpose(image))
    if not isinstance(image, np.ndarray | Tensor):
        raise UsageTypeError(
            f"an image must be a path, an image of Pillow, an array or a tensor; got {type(image).__name__}"
        )
    values = (
        image.detach().cpu().float() if isinstance(image, Tensor) and image.is_floating_point() else image
    )
    pixels = np.asarray(values)
    if pixels.dtype.kind == "f":
        if pixels.min(initial=0) < 0:
            _say("the values are normalized already, since some are negative: the image is used as it is")
            return torch.from_numpy(pixels.copy()).float()
        largest = 1.0 if pixels.max(initial=0) <= 1 else 255.0
        _say(f"values are from 0 to {largest:.0f}")
        pixels = (pixels * (255 / largest)).clip(0, 255).round()
    elif pixels.dtype != np.uint8:
        raise UsageTypeError(f"an image has uint8 or floating-point values; got {pixels.dtype}")
    pixels = _height_width_channels(pixels, first=isinstance(image, Tensor)).astype(np.uint8)
    return to_rgb(Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels))


def _height_width_channels(pixels: NDArray[Any], first: bool) -> NDArray[Any]:
    """Return an image as (H, W, C); where both ends may be channels, ``first`` says which are."""
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.ndim != 3 or 0 in pixels.shape or not {pixels.shape[0], pixels.shape[2]} & {*CHANNELS}:
        raise UsageError(f"an image must be (H, W, 3), (3, H, W) or (H, W); got {pixels.shape}")
    if pixels.shape[0] in CHANNELS and (first or pixels.shape[2] not in CHANNELS):
        _say("channels come first, and are red, green and blue")
        return pixels.transpose(1, 2, 0)
    _say("channels come last, and are red, green and blue (OpenCV has blue first: pass image[..., ::-1])")
    return pixels


@functools.cache  # once per process
def _say(sentence: str) -> None:
    LOGGER.warning("predict assumes that %s", sentence)
