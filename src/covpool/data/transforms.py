"""From a picture to a tensor: what a network wants of every image, and how training varies them.

The pipelines are torchvision's (``transforms.v2``). Up to the tensor they work on Pillow's pictures, so that
sizes are changed as in the code that networks were trained with, and so that no result depends on threads.
Whatever is random comes from torch's generator: :func:`covpool.data.order.torch_seeded` makes it a
function of a key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from covpool.errors import UsageError
from covpool.functional.arguments import check_choice

Interpolation = Literal["bilinear", "bicubic", "lanczos", "box", "hamming", "nearest"]
INTERPOLATIONS = ("bilinear", "bicubic", "lanczos", "box", "hamming", "nearest")
CropMode = Literal["center", "squash"]

# The principal components of the colours of ImageNet, of Krizhevsky et al. (2012), as they are in common use:
# eigenvalues, and eigenvectors in the columns, of RGB from 0 to 1.
EIGENVALUES = (0.2175, 0.0188, 0.0045)
EIGENVECTORS = ((-0.5675, 0.7192, 0.4009), (-0.5808, -0.0045, -0.8140), (-0.5836, -0.6948, 0.4203))


@dataclass(frozen=True)
class Preprocessing:
    """What a network wants of every image, in the words of timm's ``pretrained_cfg``.

    Attributes:
        size: the side of the square that it sees.
        crop_pct: which part of the shorter side that square is at test time.
        crop_mode: ``"center"`` keeps the proportions; ``"squash"`` makes every image a square first.
        interpolation: by which sizes are changed.
        mean: of each channel, of values from 0 to 1: 3 for RGB, 1 for gray.
        std: likewise.
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
        """What the shorter side is brought to at test time, before the square is cut out, as timm has it."""
        return math.floor(self.size / self.crop_pct)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Preprocessing:
        """That of a model's ``pretrained_cfg``, or of its bundle."""
        channels, height, width = config["input_size"]
        if channels not in (1, 3) or height != width:
            raise UsageError(
                f"images must be square and of 3 channels or 1 (gray); got {tuple(config['input_size'])}: "
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
    """How training varies an image.

    Attributes:
        crop: ``"resized"``: a part of random size and proportions; ``"random"``: the shorter side is brought
            to ``shorter_side`` and a square is cut out somewhere; ``"test"``: the part that is seen at test
            time.
        scale: of ``"resized"``: the smallest and largest part of the image's area.
        ratio: of ``"resized"``: the smallest and largest width over height.
        shorter_side: of ``"random"``: pixels, or the smallest and largest number of them, each equally
            likely. ``None``: as at test time.
        flip: the probability of left and right being exchanged.
        colour: ``"lighting"``: a random shift along the principal components of ImageNet's colours, as in
            AlexNet; ``"jitter"``: random brightness, contrast and saturation.
        strength: of the shift, its deviation (0.1 if not given, as in AlexNet); of the jitter, by which part
            of itself each of the three may change (0.4 if not given).
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
    """The same part of every image: resized, and its centre cut out."""
    return v2.Compose([*_test_crop(preprocessing), *_to_tensor(preprocessing)])


def pixels_transform(preprocessing: Preprocessing) -> v2.Transform:
    """The part of the picture that :func:`evaluation_transform` sees, in uint8: ``(3, size, size)``."""
    return v2.Compose([*_test_crop(preprocessing), v2.PILToTensor()])


def normalize_transform(preprocessing: Preprocessing) -> v2.Transform:
    """From pixels in uint8 to what the network receives: the end of :func:`evaluation_transform`."""
    return v2.Compose(_to_tensor(preprocessing)[1:])


def ten_crop_transform(preprocessing: Preprocessing) -> v2.Transform:
    """Ten parts of every image, as ``(10, 3, size, size)``: corners and centre, and the same mirrored."""
    resize, _ = _test_crop(preprocessing)
    return v2.Compose([resize, TenCrop(preprocessing)])


def training_transform(preprocessing: Preprocessing, augmentation: Augmentation) -> v2.Transform:
    """A random part of every image, perhaps with left and right exchanged and in other colours."""
    steps = _crop(preprocessing, augmentation)
    if augmentation.flip > 0:
        steps.append(v2.RandomHorizontalFlip(augmentation.flip))
    *values, normalize = _to_tensor(preprocessing)
    strength = augmentation.strength
    if augmentation.colour == "jitter":
        steps.append(v2.ColorJitter(*[0.4 if strength is None else strength] * 3))
    elif augmentation.colour == "lighting":
        values.insert(2, Lighting(0.1 if strength is None else strength))  # of RGB values from 0 to 1
    return v2.Compose([*steps, *values, normalize])


class TenCrop:
    """A picture to ten parts of it in one tensor; torchvision leaves the stacking to its callers.

    Args:
        preprocessing: says how large a part is, and how it becomes a tensor.
    """

    def __init__(self, preprocessing: Preprocessing) -> None:
        self.crop = v2.TenCrop(preprocessing.size)
        self.to_tensor = v2.Compose(_to_tensor(preprocessing))

    def __call__(self, picture: Image.Image) -> Tensor:
        """The corners, row by row, and the centre; then those of the mirrored picture."""
        return torch.stack([self.to_tensor(part) for part in self.crop(picture)])


class Lighting(v2.Transform):  # type: ignore[misc]  # torchvision is untyped
    """Shift the colours of an image along the principal components of ImageNet's, as AlexNet did.

    Args:
        strength: the standard deviation of the shift, in units of each component's eigenvalue.
    """

    def __init__(self, strength: float = 0.1) -> None:
        super().__init__()
        self.strength = strength

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw the shift of each component, and turn them into one of each channel."""
        shifts = torch.randn(3) * self.strength * torch.tensor(EIGENVALUES)
        return {"shift_C11": (torch.tensor(EIGENVECTORS) @ shifts)[:, None, None]}

    def transform(self, inpt: Tensor, params: dict[str, Any]) -> Tensor:
        """Add it to values from 0 to 1; they may leave that range."""
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
        raise UsageError(f"shorter_side must be at least {size}, the side of what is cut out; got {sides}")
    # Its second argument is one past the largest, whatever its documentation says.
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
