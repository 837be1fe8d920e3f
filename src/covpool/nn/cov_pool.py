"""The layer that takes the place of global average pooling."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from covpool.functional.arguments import check_choice, check_weights, check_whole, did_you_mean
from covpool.nn.layout import LAYOUTS, Layout, channels_first, flat_weights
from covpool.nn.pooling import METHODS, Method
from covpool.nn.reduction import REDUCTIONS, Reduction, ReductionKind


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
            raise TypeError(f"method must be a name, see methods(); got {method!r}: the width is dim=...")
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
            raise TypeError(
                f"{option} is not an option of method {name!r}; its options are: {listed}"
                f"{did_you_mean(option, names)}"
            )
    return method(channels, **options)
