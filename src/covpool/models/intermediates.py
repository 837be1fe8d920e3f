"""The features of several layers of a backbone, as channels of one map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from covpool.errors import UnsupportedBackboneError

Layers = Literal["last", "last4", "all-stages"]
LAST: Layers = "last"
SEVERAL: tuple[Layers, ...] = ("last4", "all-stages")  # each has the layers of those before it
LAYERS: tuple[Layers, ...] = (LAST, *SEVERAL)


def layer_maps(network: Any, images: Tensor, layers: Layers) -> tuple[Tensor, list[Tensor]]:
    """Return the features of the network, and the maps ``(B, C, H, W)`` of its layers.

    Layers are the outputs of timm's ``forward_intermediates``: the stages of a convolutional network, the
    blocks of a transformer, without prefix tokens and after its last norm.

    Args:
        network: a timm network.
        images: ``(B, 3, H, W)``.
        layers: ``"last4"`` for the last four, ``"all-stages"`` for all.
    """
    if not hasattr(network, "forward_intermediates"):
        raise UnsupportedBackboneError(
            f"{type(network).__name__} of timm does not give several layers: use layers='last'"
        )
    indices = None if layers == "all-stages" else min(4, len(network.feature_info))
    features, maps = network.forward_intermediates(images, indices=indices, norm=True, output_fmt="NCHW")
    return features, maps


def last_layers(maps: Sequence[Tensor], layers: Layers) -> Sequence[Tensor]:
    """Return those of all maps that ``layers`` names."""
    return maps if layers == "all-stages" else maps[-4:]


def stacked(maps: Sequence[Tensor]) -> Tensor:
    """Concatenate maps on one grid, ``(B, sum of C, H, W)``.

    The grid is that of the last map, or twice as fine if an earlier one is finer. Finer maps are averaged to
    the grid. The last map is repeated, which changes neither its mean nor its covariance.
    """
    height, width = maps[-1].shape[2:]
    factor = 2 if any(one.shape[2] > height for one in maps) else 1
    size = (factor * height, factor * width)
    return torch.cat([_on_grid(one, size) for one in maps], dim=1)


def _on_grid(one: Tensor, size: tuple[int, int]) -> Tensor:
    if one.shape[2:] == size:
        return one
    if one.shape[2] < size[0]:
        return F.interpolate(one, size=size, mode="nearest")
    return F.adaptive_avg_pool2d(one, size)
