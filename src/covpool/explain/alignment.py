"""Where in the image a place of the map is: padding and strides shift it, by up to half a place.

A grid laid over the image puts place p of a row at (p + ½) · 32 pixels, for a stride of 32. A convolution of
stride 2 whose padding is the same on both sides looks at 2p, one that pads on the right alone at 2p + 1: over
five of them that is half a place to the left, or to the right. It is measured here by the gradient of a
place's features with respect to the image, on a copy of the network with positive weights by chance and
averages in the place of maxima: trained ones would say what they look for, and not where they look.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from covpool.models.model import PooledClassifier

SEED = 0


def shift(model: PooledClassifier, size: int) -> tuple[float, float]:
    """Down and right, in pixels of an image of this size, from where a grid would put the places.

    Tokens of a transformer stay where their patches are: attention looks everywhere.
    """
    if model.format.layout != "channels_first":
        return 0.0, 0.0
    generator = torch.Generator().manual_seed(SEED)
    network = _without_preference(model.backbone, generator)
    # Of twice the side, so that the place in the middle sees no edge; dark, so that no ReLU6 saturates.
    side = 2 * size
    images = (0.01 * torch.rand(1, 3, side, side, generator=generator)).requires_grad_()
    with torch.enable_grad():
        features = network.forward_features(images)
        row, column = features.shape[2] // 2, features.shape[3] // 2
        (gradient,) = torch.autograd.grad(features[:, :, row, column].sum(), images)
    energy = gradient.abs().sum((0, 1)).double()
    down = _centre(energy.sum(1)) - _grid(row, features.shape[2], side)
    right = _centre(energy.sum(0)) - _grid(column, features.shape[3], side)
    return (down, right) if math.isfinite(down + right) else (0.0, 0.0)


def _without_preference(network: nn.Module, generator: torch.Generator) -> nn.Module:
    network = copy.deepcopy(network).cpu().float().eval()
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.MaxPool2d):
            network.set_submodule(name, nn.AvgPool2d(module.kernel_size, module.stride, module.padding))
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.reset_running_stats()
            module.reset_parameters()
        elif isinstance(module, nn.Conv2d):
            fan = module.weight[0].numel()
            module.weight.data = torch.rand(module.weight.shape, generator=generator) * 2 / fan
    return network


def _centre(energy: Tensor) -> float:
    places = torch.arange(len(energy), device=energy.device)
    return float((places * energy).sum() / energy.sum())


def _grid(place: int, places: int, size: int) -> float:
    return (place + 0.5) * size / places - 0.5
