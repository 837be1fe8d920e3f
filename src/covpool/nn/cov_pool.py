"""The pooling layer: any method, on maps, tokens or sequences, after a reduction of the channels.

The size of a covariance grows with the square of the number of channels, so the layer reduces it first.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covpool.arguments import DIM, check_choice, check_whole, did_you_mean
from covpool.errors import UsageError, UsageTypeError
from covpool.functional.covariance import normalized_weights, without_outliers
from covpool.functional.numerics import at_least_float32, check_floating, check_weights, weights_advice
from covpool.nn.pooling import DEFAULT_METHOD, METHODS, Method, check_method

ReductionKind = Literal["convolution", "linear"]
REDUCTIONS = ("convolution", "linear")

Layout = Literal["auto", "channels_first", "channels_last"]
LAYOUTS = ("auto", "channels_first", "channels_last")
# Arguments of the layer itself, which a misspelled option may mean.
OWN_OPTIONS = ("in_channels", "pool", "dim", "layout", "reduction", "device", "dtype")


class CovPool(nn.Module):
    """Global covariance pooling: a backbone's features to one vector per image.

    Args:
        in_channels: C, the number of channels of the backbone's features.
        pool: the pooling method, one of :func:`methods`.
        dim: d, the number of channels that the :class:`Reduction` leaves; ``None`` for no reduction.
        layout: position of the channels: ``"channels_first"`` ``(B, C, *positions)``, ``"channels_last"``
            ``(B, *positions, C)``, or ``"auto"``: last for 3-D input, first for 4-D and 5-D.
        reduction: ``"convolution"`` (with BatchNorm and ReLU) or ``"linear"``, for input of any rank.
            ``"auto"`` follows ``layout``: ``"linear"`` for ``"channels_last"``, which then takes tokens
            only; ``"convolution"`` for the others, which then take maps only.
        device: of the parameters and buffers.
        dtype: of the parameters and floating-point buffers.
        **method_options: options of the method; for ``"isqrt_cov"`` those of
            :func:`covpool.functional.isqrt_cov`, and ``compensation="batchnorm"``. Its default iteration is
            ``"fitted"``, with almost the paper's result; ``iteration="paper"`` is the paper's.

    Shapes:
        - x: maps ``(B, C, H, W)`` or ``(B, C, T, H, W)``; tokens ``(B, n, C)`` or maps ``(B, H, W, C)`` with
          ``layout="channels_last"``; sequences ``(B, C, L)`` with ``layout="channels_first"``.
        - weights: ``(B, n)`` or the shape of the positions, ``(B, H, W)``; boolean or non-negative.
          Positions of weight zero have no effect and may contain anything, including NaN. A negative
          weight gives NaN for its image.
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
        pool: str = DEFAULT_METHOD,
        dim: int | None = DIM,
        layout: Layout = "auto",
        *,
        reduction: ReductionKind | Literal["auto"] = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **method_options: Any,
    ) -> None:
        super().__init__()
        check_whole("in_channels", in_channels)
        if dim is not None:
            check_whole("dim", dim, expected="an int, or None for no reduction")
        if not isinstance(pool, str):
            raise UsageTypeError(f"pool must be a name, see methods(); got {pool!r}: the width is dim=...")
        check_method("pool", pool)
        check_choice("layout", layout, LAYOUTS)
        check_choice("reduction", reduction, ("auto", *REDUCTIONS))
        self.in_channels = in_channels
        self.pool = pool
        self.dim = dim
        self.layout: Layout = layout
        self.any_rank = dim is None or reduction != "auto"
        if reduction == "auto":
            reduction = "linear" if layout == "channels_last" else "convolution"
        with nullcontext() if device is None else torch.device(device):
            self.reduction = None if dim is None else Reduction(in_channels, dim, reduction)
            self.pooling = make_method(pool, dim or in_channels, method_options)
        if dtype is not None:
            self.to(dtype)

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
        if result.shape[-1] != self.out_features:  # of a registered method
            raise UsageError(
                f"{self.pool} returned {result.shape[-1]} values for each image, but its out_features is "
                f"{self.out_features}"
            )
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
            f"{self.in_channels}, pool={self.pool!r}, dim={self.dim}, layout={self.layout!r}, "
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
    if x.ndim == 3 and x.shape[0] == in_channels:
        return "add a dimension for the batch with x.unsqueeze(0)"
    layout, axis = ("channels_first", 1) if last else ("channels_last", x.ndim - 1)
    if x.shape[axis] == in_channels:
        return f'pass layout="{layout}", dimension {axis} has as many'
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
            f"weights must be {shapes}, one value per position; got shape "
            f"{tuple(weights.shape)}{weights_advice(weights, accepted)}"
        )
    return weights.flatten(1)


def make_method(name: str, channels: int, options: dict[str, Any]) -> Method:
    """Return a method by its name; an unknown option raises an error that lists the valid ones."""
    method = METHODS[name]
    names = method.option_names()
    for option in options:
        if option not in names:
            listed = ", ".join(names) or "none"
            raise UsageTypeError(
                f"{option} is not an option of pool {name!r}; its options are: {listed}"
                f"{did_you_mean(option, (*OWN_OPTIONS, *names))}"
            )
    return method(channels, **options)


class Reduction(nn.Module):
    r"""Project C channels to d at every position.

    Args:
        in_channels: C.
        dim: d.
        kind: ``"convolution"``, the paper's: a 1x1 convolution without bias, BatchNorm and ReLU, for maps.
            ``"linear"``: :math:`W x_p` alone, for tokens. It keeps the signs that a transformer's last
            LayerNorm leaves. It has no bias, because the covariance would remove it.

    Shapes:
        ``(B, C, *positions)`` to ``(B, d, *positions)``. Channels-last memory stays channels-last.

    The convolution starts as Kaiming normal (fan out), like the authors' code. The linear map starts as a
    normal of variance 1/C, which keeps the scale of the features, because no BatchNorm follows it.

    Example:
        >>> Reduction(2048, 256, "convolution")(torch.randn(2, 2048, 7, 7)).shape
        torch.Size([2, 256, 7, 7])
    """

    def __init__(self, in_channels: int, dim: int, kind: ReductionKind) -> None:
        super().__init__()
        check_choice("reduction", kind, REDUCTIONS)
        self.kind = kind
        self.projection: nn.Conv2d | nn.Linear
        if kind == "linear":
            self.projection = nn.Linear(in_channels, dim, bias=False)
            self.norm = None
        else:
            self.projection = PointwiseConv2d(in_channels, dim, 1, bias=False)
            self.norm = nn.BatchNorm2d(dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights and reset BatchNorm."""
        weight = self.projection.weight
        if self.norm is None:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        else:
            nn.init.kaiming_normal_(weight, mode="fan_out", nonlinearity="relu")
            self.norm.reset_parameters()

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Reduce. Positions of weight zero have no effect, not even on BatchNorm's statistics."""
        x_BCn = without_outliers(x.flatten(2), weights)
        if self.norm is None:
            y_Bdn = self.projection(x_BCn.mT).mT
        else:
            y_Bdn = self.projection(x_BCn.unsqueeze(2)).squeeze(2)
            y_Bdn = F.relu(_normalize(y_Bdn, self.norm, weights), inplace=True)
        result: Tensor = y_Bdn.unflatten(2, x.shape[2:])
        return result

    def extra_repr(self) -> str:
        """Return the kind; the child modules print the rest."""
        return f"kind={self.kind!r}"


class PointwiseConv2d(nn.Conv2d):
    """A 1x1 convolution as one matrix product that keeps the memory layout.

    It works on three dimensions: inductor fails on the 4-D views that torch's convolution saves for backward.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Convolve ``(B, C, H, W)`` to ``(B, d, H, W)``."""
        x_BCn, weight_dC = input.flatten(2), self.weight.flatten(1)
        if x_BCn.stride(1) == 1:
            y_Bdn = F.linear(x_BCn.mT, weight_dC).mT
        else:
            y_Bdn = F.conv1d(x_BCn, weight_dC.unsqueeze(2))
        result: Tensor = y_Bdn.unflatten(2, input.shape[2:])
        return result


def _normalize(y_Bdn: Tensor, norm: nn.BatchNorm2d, weights: Tensor | None) -> Tensor:
    if weights is not None and norm.training:
        return weighted_batch_norm(norm, y_Bdn, weights)
    normalized: Tensor = norm(y_Bdn.unsqueeze(2))
    return normalized.squeeze(2)


def weighted_batch_norm(norm: nn.BatchNorm2d, x: Tensor, weights: Tensor) -> Tensor:
    r"""Apply BatchNorm in training mode, counting every position by its weight.

    .. math::
        \mu = \tfrac1B \sum_{b,p} w_{bp} x_{bp}, \qquad
        \sigma^2 = \tfrac1B \sum_{b,p} w_{bp} (x_{bp} - \mu)^2, \qquad \sum_p w_{bp} = 1

    Equal weights give ordinary BatchNorm. Images whose weights are all zero do not count in B, nor do images
    with a negative weight.
    """
    if type(norm) is not nn.BatchNorm2d:
        raise UsageTypeError(
            f"weights in training need torch.nn.BatchNorm2d in the reduction; got {type(norm).__name__}: "
            'put it in eval mode, or create the layer with reduction="linear" or dim=None'
        )
    x_Bdn = at_least_float32(x)
    w_Bn = normalized_weights(weights, x_Bdn.dtype)
    w_Bn = w_Bn.masked_fill(w_Bn.isnan(), 0.0)  # an image with a negative weight
    images = (w_Bn.sum(-1) > 0).sum()
    w_B1n = (w_Bn / images.clamp(min=1)).unsqueeze(1)
    mean_d1 = (x_Bdn * w_B1n).sum((0, 2)).unsqueeze(1)
    centered_Bdn = x_Bdn - mean_d1
    variance_d1 = (centered_Bdn * w_B1n * centered_Bdn).sum((0, 2)).unsqueeze(1)
    _update_running(norm, mean_d1.squeeze(1), variance_d1.squeeze(1), images, (w_Bn > 0).sum())
    scale_d1 = norm.weight.unsqueeze(1) * (variance_d1 + norm.eps).rsqrt()
    return (norm.bias.unsqueeze(1) + centered_Bdn * scale_d1).to(x.dtype)


@torch.no_grad()
def _update_running(norm: nn.BatchNorm2d, mean: Tensor, variance: Tensor, images: Tensor, n: Tensor) -> None:
    if norm.running_mean is None or norm.running_var is None or norm.num_batches_tracked is None:
        return
    seen = (images > 0).to(mean.dtype)  # a batch that is fully masked changes nothing
    norm.num_batches_tracked.add_(seen.to(torch.long))
    rate = norm.momentum if norm.momentum is not None else 1.0 / norm.num_batches_tracked.clamp(min=1)
    unbiased = variance * (n / (n - 1).clamp(min=1))
    norm.running_mean.add_((mean - norm.running_mean) * (seen * rate))
    norm.running_var.add_((unbiased - norm.running_var) * (seen * rate))
