"""Pool the features of several layers of a backbone: maps on one grid, and modules that pool them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covpool.arguments import DIM, FUSIONS, Fusion, Layers, check_choice, check_whole
from covpool.errors import UnsupportedBackboneError, UsageError
from covpool.nn.cov_pool import CovPool, Reduction, ReductionKind, make_method
from covpool.nn.pooling import DEFAULT_METHOD, Method, check_method


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


class LayersPool(CovPool):
    """Covariance pooling of several layers, each after a reduction of its own.

    Args:
        channels: channels of each layer, in the order in which the map has them.
        pool: the pooling method, one of :func:`covpool.nn.methods`.
        dim: channels after the reduction: with ``"each"`` those of every layer, with ``"concat"`` those of
            all layers together. ``None`` for no reduction.
        fusion: ``"each"`` pools every layer and concatenates the vectors. ``"concat"`` concatenates the
            reduced channels and pools them once, so that the matrix also has the cross-covariances between
            layers.
        reduction: see :class:`covpool.nn.CovPool`.
        **method_options: options of the method.

    Shapes:
        maps ``(B, sum(channels), H, W)`` to ``(B, out_features)``.

    Example:
        >>> x = torch.randn(2, 24 + 40, 14, 14)
        >>> LayersPool([24, 40], dim=16, fusion="each")(x).shape, 2 * 16 * 17 // 2
        (torch.Size([2, 272]), 272)
        >>> LayersPool([24, 40], dim=16, fusion="concat")(x).shape, 16 * 17 // 2
        (torch.Size([2, 136]), 136)
    """

    def __init__(
        self,
        channels: Sequence[int],
        pool: str = DEFAULT_METHOD,
        dim: int | None = DIM,
        *,
        fusion: Fusion = "each",
        reduction: ReductionKind = "convolution",
        **method_options: Any,
    ) -> None:
        nn.Module.__init__(self)
        check_method("pool", pool)
        check_choice("fusion", fusion, FUSIONS)
        for width in channels:
            check_whole("channels of every layer", width)
        self.in_channels, self.pool, self.dim = sum(channels), pool, dim
        self.layout, self.any_rank = "channels_first", True
        self.reduction: Reduction | None = None
        widths = tuple(channels)
        if dim is not None:
            widths = (dim,) * len(channels) if fusion == "each" else shares(dim, len(channels))
            self.reduction = LayersReduction(channels, widths, reduction)
        if fusion == "each":
            self.pooling = EachLayer([make_method(pool, width, method_options) for width in widths])
        else:
            self.pooling = make_method(pool, sum(widths), method_options)


def shares(dim: int, layers: int) -> tuple[int, ...]:
    """Divide ``dim`` channels among layers; the last ones get the remainder.

    Example:
        >>> shares(128, 5)
        (25, 25, 26, 26, 26)
    """
    if dim < layers:
        raise UsageError(f"dim must be at least the number of layers, {layers}; got {dim}")
    return tuple((dim + i) // layers for i in range(layers))


class LayersReduction(Reduction):
    """A :class:`covpool.nn.Reduction` per layer: ``(B, sum(channels), …)`` to ``(B, sum(dims), …)``."""

    def __init__(self, channels: Sequence[int], dims: Sequence[int], kind: ReductionKind) -> None:
        nn.Module.__init__(self)
        self.kind, self.channels = kind, tuple(channels)
        each = zip(channels, dims, strict=True)
        self.each = nn.ModuleList([Reduction(width, dim, kind) for width, dim in each])

    @property
    def norm(self) -> None:  # type: ignore[override]
        """Each reduction has its own."""
        return None

    def reset_parameters(self) -> None:
        """Reset every reduction."""
        for layer in self.each:
            layer.reset_parameters()  # type: ignore[operator]

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Reduce each layer."""
        parts = zip(self.each, x.split(self.channels, dim=1), strict=True)
        return torch.cat([layer(part, weights) for layer, part in parts], dim=1)


class EachLayer(Method):
    """A pooling method on each layer's channels; the vectors are concatenated."""

    summary: ClassVar[str] = "a method per layer"

    def __init__(self, methods: Sequence[Method]) -> None:
        super().__init__(sum(method.channels for method in methods))
        self.each = nn.ModuleList(methods)
        self.widths = [method.channels for method in methods]

    @property
    def out_features(self) -> int:
        """Return the length of all vectors."""
        return sum(method.out_features for method in self.each)  # type: ignore[misc]

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with optional weights ``(B, n)``."""
        parts = zip(self.each, x.split(self.widths, dim=1), strict=True)
        return torch.cat([method(part, weights) for method, part in parts], dim=1)

    def reset_parameters(self) -> None:
        """Reset every method."""
        for method in self.each:
            method.reset_parameters()  # type: ignore[operator]
