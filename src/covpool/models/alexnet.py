"""AlexNet as the paper trains it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn

from covpool.errors import UsageError


class AlexNet(nn.Module):
    """The convolutions of torchvision's AlexNet, each with BatchNorm, and no dropout; 13×13 maps at 224.

    The last max-pooling belongs to it as to the original; a second-order model leaves it out with
    ``keep_resolution``, as the paper does. The hidden layers are the business of ``head="mlp"``.

    Args:
        num_classes: 0; the classifier is not here, and timm's networks are asked for the same.
        in_chans: channels of the images.
        channels: of the five convolutions.
        stem: kernel and stride of the first; for small images, ``(5, 2)`` makes 7×7 maps at 64.
    """

    # What timm's networks say of themselves.
    pretrained_cfg: ClassVar[dict[str, Any]] = {
        "architecture": "alexnet",
        "input_size": (3, 224, 224),
        "interpolation": "bilinear",
        "crop_pct": 0.875,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "features.0",
        "classifier": (),
    }

    def __init__(
        self,
        num_classes: int = 0,
        in_chans: int = 3,
        channels: Sequence[int] = (64, 192, 384, 256, 256),
        stem: Sequence[int] = (11, 4),
    ) -> None:
        super().__init__()
        if num_classes:
            raise UsageError("AlexNet is a backbone: create_model puts pooling and classifier behind it")
        first, second, third, fourth, last = channels
        kernel, stride = stem
        self.num_features = last
        self.features = nn.Sequential(
            *_convolution(in_chans, first, kernel, stride=stride, padding=2),
            nn.MaxPool2d(3, 2),
            *_convolution(first, second, 5, padding=2),
            nn.MaxPool2d(3, 2),
            *_convolution(second, third, 3, padding=1),
            *_convolution(third, fourth, 3, padding=1),
            *_convolution(fourth, last, 3, padding=1),
            nn.MaxPool2d(3, 2),
        )

    def forward_features(self, x: Tensor) -> Tensor:
        """Images ``(B, 3, H, W)`` to maps ``(B, C, h, w)``."""
        maps: Tensor = self.features(x)
        return maps

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        """The layers in order, for timm's layer-wise decay."""
        return {"stem": r"^features\.[01]\.", "blocks": r"^features\.(\d+)"}


def _convolution(before: int, after: int, kernel: int, *, stride: int = 1, padding: int) -> list[nn.Module]:
    conv = nn.Conv2d(before, after, kernel, stride, padding, bias=False)  # BatchNorm would undo a bias
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return [conv, nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
