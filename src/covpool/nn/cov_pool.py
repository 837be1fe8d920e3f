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
from covpool.nn.pooling import DEFAULT_METHOD, METHODS, Method
from covpool.nn.reduction import DIM, REDUCTIONS, Reduction, ReductionKind

Layout = Literal["auto", "channels_first", "channels_last"]
LAYOUTS = ("auto", "channels_first", "channels_last")


class CovPool(nn.Module):
    """Global covariance pooling: a backbone's features to one vector per image.

    Args:
        in_channels: C, the number of channels of the backbone's features.
        method: one of :func:`methods`.
        dim: d, the number of channels that the :class:`Reduction` leaves; ``None`` for no reduction.
        layout: position of the channels: ``"channels_first"`` ``(B, C, *positions)``, ``"channels_last"``
            ``(B, *positions, C)``, or ``"auto"``: last for 3-D input, first for 4-D and 5-D.
        reduction: ``"convolution"`` (with BatchNorm and ReLU) or ``"linear"``, for input of any rank.
            ``"auto"`` follows ``layout``: ``"linear"`` for ``"channels_last"``, which then takes tokens
            only; ``"convolution"`` for the others, which then take maps only.
        **method_options: options of the method; for ``"isqrt_cov"`` those of
            :func:`covpool.functional.isqrt_cov` and ``compensation="batchnorm"``.

    Shapes:
        - x: maps ``(B, C, H, W)`` or ``(B, C, T, H, W)``; tokens ``(B, n, C)`` or maps ``(B, H, W, C)`` with
          ``layout="channels_last"``; sequences ``(B, C, L)`` with ``layout="channels_first"``.
        - weights: ``(B, n)`` or the shape of the positions, ``(B, H, W)``; boolean or non-negative.
          Positions of weight zero have no effect and may contain anything, including NaN.
        - result: ``(B, out_features)``, in float32 at least.

    Example:
        >>> pool = CovPool(2048, dim=256)
        >>> pool(torch.randn(2, 2048, 7, 7)).shape, pool.out_features
        (torch.Size([2, 32896]), 32896)
        >>> CovPool(768, dim=64, layout="channels_last")(torch.randn(2, 196, 768)).shape
        torch.Size([2, 2080])
    """

    def __init__(
        self,
        in_channels: int,
        method: str = DEFAULT_METHOD,
        dim: int | None = DIM,
        layout: Layout = "auto",
        *,
        reduction: ReductionKind | Literal["auto"] = "auto",
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
        check_choice("reduction", reduction, ("auto", *REDUCTIONS))
        self.in_channels = in_channels
        self.method = method
        self.dim = dim
        self.layout: Layout = layout
        self.any_rank = dim is None or reduction != "auto"
        if reduction == "auto":
            reduction = "linear" if layout == "channels_last" else "convolution"
        self.reduction = None if dim is None else Reduction(in_channels, dim, reduction)
        self.pooling = _make_method(method, dim or in_channels, method_options)

    @property
    def out_features(self) -> int:
        """The length of the pooled vector."""
        return self.pooling.out_features

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool the features. Without a reduction, the method receives a view of ``x``."""
        x = channels_first(x, self.in_channels, self.layout)
        if weights is not None:
            weights = flat_weights(weights, x)
            check_weights(weights, x.flatten(2))
        if self.reduction is not None:
            self._check_rank(x)
            x = self.reduction(x, weights)
        result: Tensor = self.pooling(x.flatten(2), weights)
        return result

    def _check_rank(self, x: Tensor) -> None:
        """Raise where ``layout`` chose the reduction for the other kind of input."""
        assert self.reduction is not None
        if self.any_rank or (x.ndim == 3) == (self.reduction.kind == "linear"):
            return
        if x.ndim > 3:
            fix = 'is for tokens (B, n, C). For maps, create the layer with reduction="convolution"'
        elif self.layout == "auto":
            fix = 'is for maps (B, C, H, W). For tokens, create the layer with layout="channels_last"'
        else:
            fix = 'is for maps (B, C, H, W). For sequences, create the layer with reduction="linear"'
        raise UsageError(f"x has {x.ndim} dimensions, but the reduction of this layer {fix}")

    def reset_parameters(self) -> None:
        """Draw new weights and reset BatchNorms."""
        if self.reduction is not None:
            self.reduction.reset_parameters()
        self.pooling.reset_parameters()

    def extra_repr(self) -> str:
        """Return the options that the child modules do not print."""
        return (
            f"{self.in_channels}, method={self.method!r}, dim={self.dim}, layout={self.layout!r}, "
            f"out_features={self.out_features}"
        )


def methods() -> dict[str, str]:
    """Return the name of every method of :class:`CovPool` with a one-line summary.

    Example:
        >>> methods()["isqrt_cov"]
        'matrix square root of the covariance by Newton-Schulz iteration (iSQRT-COV)'
    """
    return {name: method.summary for name, method in METHODS.items()}


def channels_first(x: Tensor, in_channels: int, layout: Layout) -> Tensor:
    """Return ``x`` as ``(B, C, *positions)``, without a copy.

    Args:
        x: features in the given layout.
        in_channels: C, to check x against.
        layout: see :class:`CovPool`.
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
    return f"create the layer with in_channels={x.shape[x.ndim - 1 if last else 1]}"


def flat_weights(weights: Tensor, x: Tensor) -> Tensor:
    """Return weights of ``(B, *positions)`` or ``(B, n)`` as ``(B, n)``, for x of ``(B, C, *positions)``."""
    if not isinstance(weights, Tensor):
        raise UsageTypeError(f"weights must be a torch.Tensor; got {type(weights).__name__}")
    batch, positions = x.shape[0], tuple(x.shape[2:])
    accepted = [(batch, *positions), (batch, math.prod(positions))]
    if tuple(weights.shape) not in accepted:
        shapes = " or ".join(str(shape) for shape in dict.fromkeys(accepted))
        raise UsageError(
            f"weights must be {shapes}, one value per position; got shape {tuple(weights.shape)}: "
            "use weights.expand(...) to share one mask across the batch"
        )
    return weights.flatten(1)


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
