"""The pooling layer: any method, on maps, tokens or sequences."""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import Tensor, nn

from covpool.errors import UsageError, UsageTypeError
from covpool.functional.arguments import (
    check_choice,
    check_floating,
    check_weights,
    check_whole,
    did_you_mean,
)
from covpool.nn.pooling import METHODS, Method
from covpool.nn.reduction import REDUCTIONS, Reduction, ReductionKind

Layout = Literal["auto", "channels_first", "channels_last"]
LAYOUTS = ("auto", "channels_first", "channels_last")


def channels_first(x: Tensor, in_channels: int, layout: Layout) -> Tensor:
    """``x`` as ``(B, C, *positions)``, never copied.

    Args:
        x: features in the given layout.
        in_channels: C, to check x against.
        layout: ``"channels_first"`` is ``(B, C, *positions)``, ``"channels_last"`` is
            ``(B, *positions, C)``, ``"auto"`` is channels last for 3-D x (tokens) and channels first
            for 4-D and 5-D (maps of images and of video).
    """
    check_floating("x", x)
    if x.ndim < 3 or (layout == "auto" and x.ndim > 5):
        raise UsageError(
            f"x must be (B, C, H, W), (B, C, T, H, W) or tokens (B, n, C); got shape {tuple(x.shape)}: "
            "pass features from before the backbone's own pooling"
        )
    last = layout == "channels_last" or (layout == "auto" and x.ndim == 3)
    axis = x.ndim - 1 if last else 1
    if x.shape[axis] != in_channels:
        raise UsageError(
            f"x must have in_channels={in_channels} channels in dimension {axis} for layout={layout!r}; "
            f"got shape {tuple(x.shape)}: {_advice(x, in_channels, last)}"
        )
    if 0 in x.shape[1:]:
        raise UsageError(f"x must have at least one position; got shape {tuple(x.shape)}")
    return x.movedim(-1, 1) if last else x


def _advice(x: Tensor, in_channels: int, last: bool) -> str:
    other, axis = ("channels_first", 1) if last else ("channels_last", x.ndim - 1)
    if x.shape[axis] == in_channels:
        return f'pass layout="{other}", dimension {axis} has as many'
    return f"make the layer with in_channels={x.shape[x.ndim - 1 if last else 1]}"


def flat_weights(weights: Tensor, x: Tensor) -> Tensor:
    """Weights of ``(B, *positions)`` or ``(B, n)`` as ``(B, n)``, for x of ``(B, C, *positions)``."""
    if not isinstance(weights, Tensor):
        raise UsageTypeError(f"weights must be a torch.Tensor; got {type(weights).__name__}")
    batch, positions = x.shape[0], tuple(x.shape[2:])
    accepted = [(batch, *positions), (batch, math.prod(positions))]
    if tuple(weights.shape) not in accepted:
        shapes = " or ".join(str(shape) for shape in dict.fromkeys(accepted))
        raise UsageError(
            f"weights must be {shapes}, one number for each position; got shape {tuple(weights.shape)}: "
            "use weights.expand(...) if one mask serves the whole batch"
        )
    return weights.flatten(1)


class CovPool(nn.Module):
    """Global covariance pooling: a backbone's features to one vector an image.

    Args:
        in_channels: C, the channels of the backbone's features.
        method: one of :func:`methods`.
        dim: d, the channels left by the :class:`Reduction` before the covariance; ``None`` for no reduction.
        layout: where the channels are: ``"channels_first"`` ``(B, C, *positions)``, ``"channels_last"``
            ``(B, *positions, C)``, or ``"auto"``: last for 3-D input, first for 4-D and 5-D.
        reduction: ``"convolution"`` (with BatchNorm and ReLU), ``"linear"``, or ``"auto"``: linear for
            3-D input, a convolution for 4-D and 5-D.
        **method_options: those of the method; for ``"isqrt_cov"``, see
            :func:`covpool.functional.isqrt_cov`, with ``compensation="batchnorm"`` beside.

    Shapes:
        - x: maps ``(B, C, H, W)`` or ``(B, C, T, H, W)``, tokens ``(B, n, C)``; ``(B, C, L)`` with
          ``layout="channels_first"``, ``(B, H, W, C)`` with ``layout="channels_last"``.
        - weights: ``(B, n)`` or the shape of the positions, ``(B, H, W)``; a bool mask or numbers >= 0.
          Positions of weight zero have no say in the result and may hold anything, NaN included.
        - result: ``(B, out_features)``, in float32 at least.

    Example:
        >>> pool = CovPool(2048, dim=256)
        >>> pool(torch.randn(2, 2048, 7, 7)).shape, pool.out_features
        (torch.Size([2, 32896]), 32896)
        >>> CovPool(768, dim=64)(torch.randn(2, 196, 768)).shape
        torch.Size([2, 2080])
    """

    def __init__(
        self,
        in_channels: int,
        method: str = "isqrt_cov",
        dim: int | None = 256,
        layout: Layout = "auto",
        *,
        reduction: ReductionKind = "auto",
        **method_options: Any,
    ) -> None:
        super().__init__()
        check_whole("in_channels", in_channels)
        if dim is not None:
            check_whole("dim", dim, wanted="an int, or None for no reduction")
        if not isinstance(method, str):
            raise UsageTypeError(
                f"method must be a name, see methods(); got {method!r}: the width is dim=..."
            )
        check_choice("method", method, METHODS)
        check_choice("layout", layout, LAYOUTS)
        check_choice("reduction", reduction, REDUCTIONS)
        self.in_channels = in_channels
        self.method = method
        self.dim = dim
        self.layout: Layout = layout
        self.reduction = None if dim is None else Reduction(in_channels, dim, reduction)
        self.pooling = _make_method(method, dim or in_channels, method_options)

    @property
    def out_features(self) -> int:
        """The length of the vector that the classifier receives."""
        return self.pooling.out_features

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool. Nothing is copied on the way to the method when there is no reduction."""
        x = channels_first(x, self.in_channels, self.layout)
        if weights is not None:
            weights = flat_weights(weights, x)
            check_weights(weights, x.flatten(2))
        if self.reduction is not None:
            x = self.reduction(x, weights)
        result: Tensor = self.pooling(x.flatten(2), weights)
        return result

    def reset_parameters(self) -> None:
        """Start again: new weights, BatchNorms as new."""
        if self.reduction is not None:
            self.reduction.reset_parameters()
        self.pooling.reset_parameters()

    def extra_repr(self) -> str:
        """What the children do not tell."""
        return (
            f"{self.in_channels}, method={self.method!r}, dim={self.dim}, layout={self.layout!r}, "
            f"out_features={self.out_features}"
        )


def methods() -> dict[str, str]:
    """Every method of :class:`CovPool` with a line on it.

    Example:
        >>> methods()["isqrt_cov"]
        'matrix square root of the covariance by Newton-Schulz iteration (iSQRT-COV)'
    """
    return {name: method.summary for name, method in METHODS.items()}


def _make_method(name: str, channels: int, options: dict[str, Any]) -> Method:
    method = METHODS[name]
    names = method.option_names()
    for option in options:
        if option not in names:
            listed = ", ".join(names) or "none"
            raise UsageTypeError(
                f"{option} is not an option of method {name!r}; its options are: {listed}"
                f"{did_you_mean(option, names)}"
            )
    return method(channels, **options)
