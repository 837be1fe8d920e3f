"""Modules before and after the pooling: maps of several layers of a backbone, and the classifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covpool.arguments import Layers
from covpool.errors import UnsupportedBackboneError


class Head(nn.Module):
    """Optional hidden layers, optional normalization, dropout, classifier.

    The pooled vector is long, d(d+1)/2 values. At 1,000 classes a dense classifier has as many parameters as
    a backbone. A bottleneck makes more classes possible:

    ============================ =========================================
    ``Head(v, k)``               dense: v·k weights
    ``Head(v, k, rank=r)``       low rank, still linear: r·(v + k)
    ``Head(v, k, hidden=(h,))``  an MLP with ReLU: v·h + h·k
    ============================ =========================================

    Args:
        in_features: v, the length of the pooled vector.
        num_classes: k; 0 for no classifier.
        rank: r, or ``None``.
        hidden: widths of hidden layers; the paper's AlexNet and VGG have (4096, 4096).
        batchnorm: BatchNorm after each hidden layer.
        drop_rate: dropout after each hidden layer, or on the vector if there is none.
        normalize: ``"l2"`` divides the input of the classifier by its norm.

    Shapes:
        ``(B, in_features)`` to ``(B, num_classes)``; ``(B, hidden_size)`` with ``pre_logits=True``.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        rank: int | None = None,
        hidden: Sequence[int] = (),
        batchnorm: bool = False,
        drop_rate: float = 0.0,
        normalize: Literal["l2"] | None = None,
    ) -> None:
        super().__init__()
        self.classifier: nn.Module
        self.in_features = in_features
        if rank is not None:
            # Without ReLU and bias it is a linear map of rank r.
            self.hidden = nn.Sequential(nn.Linear(in_features, rank, bias=False))
        else:
            self.hidden = _hidden_layers(in_features, hidden, batchnorm, drop_rate)
        self.hidden_size = rank or (hidden[-1] if hidden else in_features)
        self.normalize = normalize
        self.drop = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes, like=torch.empty(0))

    def reset_classifier(self, num_classes: int, like: Tensor) -> None:
        """Replace the classifier (0 classes for none), on the device and in the dtype of ``like``."""
        self.classifier = (
            nn.Linear(self.hidden_size, num_classes, device=like.device, dtype=like.dtype)
            if num_classes
            else nn.Identity()
        )

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return the logits, or the input of the classifier with ``pre_logits``."""
        first = self.hidden[0] if len(self.hidden) else self.classifier
        if isinstance(first, nn.Linear):
            x = x.to(first.weight.dtype)  # a model cast to half precision still pools in float32
        x = self.hidden(x)
        if self.normalize is not None:
            x = unit(x)
        x = self.drop(x)
        return x if pre_logits else self.classifier(x)


def unit(x: Tensor) -> Tensor:
    """Divide each row by its norm, computed in float32 at least; rows of zeros stay zero."""
    full = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.normalize(full, dim=1).to(x.dtype)


def _hidden_layers(before: int, widths: Sequence[int], batchnorm: bool, drop_rate: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in widths:
        if layers:
            layers.append(nn.Dropout(drop_rate))
        layers.append(nn.Linear(before, width, bias=not batchnorm))
        if batchnorm:
            layers.append(nn.BatchNorm1d(width))
        layers.append(nn.ReLU(inplace=True))
        before = width
    return nn.Sequential(*layers)


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
    factor = 2 if any(x.shape[2] > height for x in maps) else 1
    size = (factor * height, factor * width)
    return torch.cat([_on_grid(x, size) for x in maps], dim=1)


def _on_grid(x: Tensor, size: tuple[int, int]) -> Tensor:
    if x.shape[2:] == size:
        return x
    if x.shape[2] < size[0]:
        return F.interpolate(x, size=size, mode="nearest")
    return F.adaptive_avg_pool2d(x, size)
