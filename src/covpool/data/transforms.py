"""Image transforms: preprocessing for evaluation and augmentation for training.

The pipelines are torchvision's (``transforms.v2``). They resize Pillow images, not tensors: pretrained
networks were trained that way, and results do not depend on the number of threads. All random numbers come
from torch's generator, which :func:`covpool.data.order.torch_seeded` seeds by a key.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms import v2

from covpool.arguments import check_choice
from covpool.errors import UsageError, UsageTypeError

Interpolation = Literal["bilinear", "bicubic", "lanczos", "box", "hamming", "nearest"]
INTERPOLATIONS = ("bilinear", "bicubic", "lanczos", "box", "hamming", "nearest")
CropMode = Literal["center", "squash"]

# Principal components of ImageNet's colors (Krizhevsky et al. 2012) in their widely used form: eigenvalues,
# and eigenvectors in the columns, for RGB values from 0 to 1.
EIGENVALUES = (0.2175, 0.0188, 0.0045)
EIGENVECTORS = ((-0.5675, 0.7192, 0.4009), (-0.5808, -0.0045, -0.8140), (-0.5836, -0.6948, 0.4203))


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing of a network's images, with the names of timm's ``pretrained_cfg``.

    Attributes:
        size: image size in pixels; inputs are square.
        crop_pct: size of the center crop relative to the shorter side, at test time.
        crop_mode: ``"center"`` keeps the aspect ratio; ``"squash"`` first resizes every image to a square.
        interpolation: interpolation for resizing.
        mean: mean per channel, for values from 0 to 1: 3 values for RGB, 1 for gray.
        std: standard deviation per channel, in the same form as ``mean``.
    """

    size: int = 224
    crop_pct: float = 0.875
    crop_mode: CropMode = "center"
    interpolation: Interpolation = "bicubic"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        check_choice("crop_mode", self.crop_mode, ("center", "squash"))
        check_choice("interpolation", self.interpolation, INTERPOLATIONS)
        if self.size < 1 or not 0 < self.crop_pct <= 1:
            raise UsageError(
                f"size must be at least 1 and crop_pct in (0, 1]; got {self.size} and {self.crop_pct}"
            )

    @property
    def resized_side(self) -> int:
        """Size of the shorter side before the center crop at test time, rounded as in timm."""
        return math.floor(self.size / self.crop_pct)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Preprocessing:
        """Return the preprocessing of a model's ``pretrained_cfg`` or of its bundle."""
        channels, height, width = config["input_size"]
        if channels not in (1, 3) or height != width:
            raise UsageError(
                f"images must be square, with 3 channels or 1 (gray); got {tuple(config['input_size'])}: "
                "pass tensors to the model"
            )
        mean, std = (tuple(float(value) for value in config[name]) for name in ("mean", "std"))
        if len(mean) != channels or len(std) != channels:
            raise UsageError(f"mean and std must have one value per channel; got {mean} and {std}")
        return cls(
            size=height,
            crop_pct=config.get("crop_pct") or cls.crop_pct,
            crop_mode=config.get("crop_mode") or cls.crop_mode,
            interpolation=config.get("interpolation") or cls.interpolation,
            mean=mean,
            std=std,
        )


@dataclass(frozen=True)
class Augmentation:
    """Augmentation of training images.

    Attributes:
        crop: ``"resized"``: a crop of random size and aspect ratio; ``"random"``: the shorter side is resized
            to ``shorter_side`` and a square is cropped at random; ``"test"``: the crop of test time.
        scale: range of the crop's area relative to the image, for ``"resized"``.
        ratio: range of the crop's width over height, for ``"resized"``.
        shorter_side: pixels, or a range of pixels drawn uniformly, for ``"random"`` (default: as at test
            time).
        flip: probability of a horizontal flip.
        colour: ``"lighting"``: a random shift along the principal components of ImageNet's colors, as in
            AlexNet; ``"jitter"``: random brightness, contrast and saturation.
        strength: standard deviation of the lighting shift (default 0.1, as in AlexNet), or relative change of
            brightness, contrast and saturation (default 0.4).
    """

    crop: Literal["resized", "random", "test"] = "resized"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    shorter_side: int | tuple[int, int] | None = None
    flip: float = 0.5
    colour: Literal["none", "lighting", "jitter"] = "none"
    strength: float | None = None

    def __post_init__(self) -> None:
        check_choice("crop", self.crop, ("resized", "random", "test"))
        check_choice("colour", self.colour, ("none", "lighting", "jitter"))


def evaluation_transform(preprocessing: Preprocessing) -> v2.Transform:
    """Return the transform for evaluation: resize and center crop."""
    return v2.Compose([*_test_crop(preprocessing), *_to_tensor(preprocessing)])


def pixels_transform(preprocessing: Preprocessing) -> v2.Transform:
    """Return the crop of :func:`evaluation_transform` as uint8 pixels, ``(3, size, size)``."""
    return v2.Compose([*_test_crop(preprocessing), v2.PILToTensor()])


def normalize_transform(preprocessing: Preprocessing) -> v2.Transform:
    """Return the transform from uint8 pixels to network inputs: the end of :func:`evaluation_transform`."""
    return v2.Compose(_to_tensor(preprocessing)[1:])


def ten_crop_transform(preprocessing: Preprocessing) -> v2.Transform:
    """Return a ten-crop transform, ``(10, 3, size, size)``: corners, center, and their horizontal flips."""
    resize, _ = _test_crop(preprocessing)
    return v2.Compose([resize, TenCrop(preprocessing)])


def training_transform(preprocessing: Preprocessing, augmentation: Augmentation) -> v2.Transform:
    """Return the transform for training: random crop, horizontal flip and color augmentation."""
    steps = _crop(preprocessing, augmentation)
    if augmentation.flip > 0:
        steps.append(v2.RandomHorizontalFlip(augmentation.flip))
    *values, normalize = _to_tensor(preprocessing)
    strength = augmentation.strength
    if augmentation.colour == "jitter":
        steps.append(v2.ColorJitter(*[0.4 if strength is None else strength] * 3))
    elif augmentation.colour == "lighting":
        values.insert(2, Lighting(0.1 if strength is None else strength))  # on RGB values from 0 to 1
    return v2.Compose([*steps, *values, normalize])


class TenCrop:
    """Ten crops of an image, stacked in one tensor; torchvision returns a tuple."""

    def __init__(self, preprocessing: Preprocessing) -> None:
        self.crop = v2.TenCrop(preprocessing.size)
        self.to_tensor = v2.Compose(_to_tensor(preprocessing))

    def __call__(self, picture: Image.Image) -> Tensor:
        """Return the corners, row by row, and the center; then those of the horizontal flip."""
        return torch.stack([self.to_tensor(part) for part in self.crop(picture)])


class Lighting(v2.Transform):  # type: ignore[misc]  # torchvision is untyped
    """Shift the colors of an image along the principal components of ImageNet, as AlexNet did.

    Args:
        strength: standard deviation of the shift, in units of each component's eigenvalue.
    """

    def __init__(self, strength: float = 0.1) -> None:
        super().__init__()
        self.strength = strength

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw the shift of each component and convert the shifts to channels."""
        shifts = torch.randn(3) * self.strength * torch.tensor(EIGENVALUES)
        return {"shift_C11": (torch.tensor(EIGENVECTORS) @ shifts)[:, None, None]}

    def transform(self, inpt: Tensor, params: dict[str, Any]) -> Tensor:
        """Add the shift to values from 0 to 1; the results may leave that range."""
        shift_C11: Tensor = params["shift_C11"]
        return inpt + shift_C11


def _crop(preprocessing: Preprocessing, augmentation: Augmentation) -> list[v2.Transform]:
    size, mode = preprocessing.size, _mode(preprocessing)
    if augmentation.crop == "test":
        return _test_crop(preprocessing)
    if augmentation.crop == "resized":
        return [v2.RandomResizedCrop(size, augmentation.scale, augmentation.ratio, mode)]
    sides = augmentation.shorter_side or preprocessing.resized_side
    smallest, largest = (sides, sides) if isinstance(sides, int) else sides
    if not size <= smallest <= largest:
        raise UsageError(f"shorter_side must be at least {size}, the size of the crop; got {sides}")
    # Its second argument is exclusive, contrary to torchvision's documentation.
    return [v2.RandomResize(smallest, largest + 1, mode), v2.RandomCrop(size)]


def _test_crop(preprocessing: Preprocessing) -> list[v2.Transform]:
    side = preprocessing.resized_side
    squash = preprocessing.crop_mode == "squash"
    resize = v2.Resize((side, side) if squash else side, _mode(preprocessing))
    return [resize, v2.CenterCrop(preprocessing.size)]


def _to_tensor(preprocessing: Preprocessing) -> list[v2.Transform]:
    gray = [v2.Grayscale()] if len(preprocessing.mean) == 1 else []
    return [
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True),
        *gray,
        v2.Normalize(list(preprocessing.mean), list(preprocessing.std)),
    ]


def _mode(preprocessing: Preprocessing) -> v2.InterpolationMode:
    return v2.InterpolationMode(preprocessing.interpolation)


LOGGER = logging.getLogger("covpool")
# Channels of an image: gray, RGB, RGB with transparency.
CHANNELS = (1, 3, 4)


def all_opened(images: Any) -> tuple[Iterator[Image.Image | Tensor], bool]:
    """Open images one by one, and return whether there may be several: a list, or a batch in one array."""
    if isinstance(images, np.ndarray | Tensor) and images.ndim == 4:
        pixels = _scaled(images)
        return (_of_pixels(one, isinstance(images, Tensor)) for one in pixels), True
    if isinstance(images, Sequence) and not isinstance(images, str | bytes):
        return map(opened, images), True
    return map(opened, [images]), False


def opened(image: Any) -> Image.Image | Tensor:
    """Return an image in RGB and upright, or as a tensor that is preprocessed already.

    Args:
        image: a path, an image of Pillow, or an array or a tensor: (H, W, 3), (3, H, W) or (H, W).

    Raises:
        BadImageError: if a file cannot be read.
        UsageError: if an array has another shape, or values that may mean several things.
    """
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
    return _of_pixels(_scaled(image), isinstance(image, Tensor))


def _scaled(image: NDArray[Any] | Tensor) -> NDArray[Any]:
    """Return the uint8 pixels of an image or a batch, or floats if they are preprocessed."""
    if isinstance(image, Tensor):
        image = image.detach().cpu()
        image = image.float() if image.is_floating_point() else image  # NumPy has no bfloat16
    values = np.asarray(image)
    if values.dtype == np.uint8:
        return values
    if values.dtype.kind != "f":
        raise UsageTypeError(f"an image has uint8 or floating-point values; got {values.dtype}")
    low, high = float(values.min(initial=0)), float(values.max(initial=0))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UsageError("an image has values that are NaN or infinite")
    # Resizing may exceed the range a little. Preprocessed values are hardly ever larger than 10.
    if low >= -0.1 and high <= 1.1:
        largest = 1.0
    elif low >= -20 and 20 < high <= 275:
        largest = 255.0
    elif low < 0 and high <= 20:
        _say("the values are normalized already, since some are negative: the image is used as it is")
        return values.astype(np.float32)
    else:
        raise UsageError(
            f"the values of an image are from {low:g} to {high:g}, and not from 0 to 1 or 0 to 255: pass "
            "uint8, or call the model itself with preprocessed images"
        )
    _say(f"values are from 0 to {largest:.0f}")
    pixels: NDArray[Any] = (values * (255 / largest)).clip(0, 255).round().astype(np.uint8)
    return pixels


def _of_pixels(pixels: NDArray[Any], first: bool) -> Image.Image | Tensor:
    from covpool.data.decode import to_rgb

    if pixels.dtype != np.uint8:
        return torch.from_numpy(pixels)
    pixels = _height_width_channels(pixels, first)
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
