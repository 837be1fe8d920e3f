"""Deletion and insertion: whether the places that a map credits are those that the network needs.

Places are blurred away, the most credited first, and the probability of the class is followed: the sooner it
falls, the better the order (deletion: less area under the curve). Or they are brought into a blurred image:
the sooner it rises, the better (insertion: more area). V. Petsiuk, A. Das, K. Saenko, "RISE", BMVC 2018.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.transforms.v2.functional import gaussian_blur

# Shares of the image at which the probability is measured, and the blur over the image's side.
SHARES = tuple(i / 10 for i in range(11))
BLUR = 0.08
Classify = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Areas:
    """Under the curves of the probability of a class against the share of the image, from 0 to 1."""

    deletion: float
    insertion: float


def areas(classify: Classify, image: Tensor, label: int, orders: Mapping[str, Tensor]) -> dict[str, Areas]:
    """Of several maps of one image.

    Args:
        classify: preprocessed images ``(B, 3, H, W)`` to logits.
        image: ``(3, H, W)``, preprocessed.
        label: the class whose probability is followed.
        orders: maps ``(H, W)`` of the image's size; pixels of higher value go first.
    """
    blurred = _blurred(image)
    found = {}
    for name, order in orders.items():
        rank = order.flatten().argsort(descending=True).argsort().reshape(image.shape[1:])
        masks = torch.stack([rank < share * rank.numel() for share in SHARES])[:, None]
        both = torch.cat([torch.where(masks, blurred, image), torch.where(masks, image, blurred)])
        with torch.inference_mode():
            likely = classify(both).float().softmax(1)[:, label]
        deletion, insertion = (torch.trapezoid(part, dx=SHARES[1]) for part in likely.chunk(2))
        found[name] = Areas(float(deletion), float(insertion))
    return found


def centre_first(height: int, width: int) -> Tensor:
    """The order that knows nothing of the image but that photographers put things in the middle."""
    y = torch.linspace(-1, 1, height)[:, None]
    x = torch.linspace(-1, 1, width)
    return -(y * y + x * x)


def _blurred(image: Tensor) -> Tensor:
    size = 2 * round(BLUR * image.shape[-1] * 2) + 1
    result: Tensor = gaussian_blur(image, [size, size], [BLUR * image.shape[-1]] * 2)
    return result
