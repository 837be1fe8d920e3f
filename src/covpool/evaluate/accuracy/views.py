"""Where a network looks at an image before it decides: the logits of all views are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from covpool.data.batch import Transform
from covpool.data.transforms import Preprocessing, evaluation_transform, ten_crop_transform
from covpool.evaluate.passes import channels_last

Views = Literal["one", "flip", "ten-crop"]
VIEWS = ("one", "flip", "ten-crop")


def views_transform(preprocessing: Preprocessing, views: Views) -> Transform:
    """From a picture to what :class:`AveragedViews` wants of it."""
    make = ten_crop_transform if views == "ten-crop" else evaluation_transform
    transform: Transform = make(preprocessing)
    return transform


class AveragedViews(nn.Module):
    """A classifier that averages its logits over views of an image.

    Args:
        model: gives the logits of one view.
        views: ``"one"``; ``"flip"``, the image and its mirror; ``"ten-crop"``.

    Shapes:
        ``(B, 3, H, W)``, or ``(B, 10, 3, H, W)`` for ten crops, to ``(B, K)``.
    """

    def __init__(self, model: nn.Module, views: Views) -> None:
        super().__init__()
        self.model, self.views = model, views

    def forward(self, images: Tensor) -> Tensor:
        """One view after the other, so that all of them need no more memory than one."""
        logits = [self.model(channels_last(view)).float() for view in self._views(images)]
        return torch.stack(logits).mean(dim=0)

    def _views(self, images: Tensor) -> Sequence[Tensor]:
        if self.views == "ten-crop":
            return images.unbind(dim=1)
        return (images, images.flip(-1)) if self.views == "flip" else (images,)
