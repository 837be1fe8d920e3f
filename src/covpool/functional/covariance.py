"""Mean, second moment and covariance of features, their centering, and symmetric matrices as vectors.

Three cases that a plain ``x - x.mean()`` gets wrong are solved in :func:`center`, for every operator:

* Scale: M is divided by ``s = max - min`` of the channel with the largest spread, so that activations of
  1e-12 and 1e12 are the same problem. The derivative treats s as a constant; the operators undo it exactly.
* Offset: each channel is first shifted by one of its own features (its minimum; with weights, the feature
  with the largest weight), then centered. This is exact for a channel that varies little around a large
  value.
* Flatness: a channel whose spread is within four rounding units of its magnitude holds rounding errors, not
  signal. It is zero in M and gets a zero gradient.

Shapes of the private functions: x ``(B, C, n)``, weights ``(B, n)``; values per image are ``(B, 1, 1)``.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from covpool.errors import UsageError
from covpool.functional.numerics import (
    at_least_float32,
    autocast_off,
    check_features,
    check_floating,
    check_square,
    check_weights,
    may_overwrite,
    reciprocal_or_zero,
)

# These are ints: torch.compile treats a module-level float as an input of the graph, and a second call in the
# same graph then fails.
# A channel is constant if its spread is at most this many units of rounding.
FLAT_ULPS = 4
# A feature at a position of weight zero becomes zero if it is this many times larger than every feature that
# counts: products with it would give Inf or NaN.
OUTLIER = 1000
# A feature at a position of weight zero is clipped at this many spreads. It does not change the value, only
# the derivative with respect to its weight.
OUTLIER_SPREADS = 1000


def mean(x: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Return the mean over positions, :math:`\tfrac1n \sum_p x_p`, or :math:`\sum_p w_p x_p` with weights.

    Args:
        x: features ``(B, C, n)``.
        weights: ``(B, n)``, boolean or non-negative, divided by their sum. Positions of weight zero may
            contain anything, including NaN.

    Returns:
        ``(B, C)``, in float32 for half-precision input.
    """
    x_BCn = at_least_float32(x)
    if weights is None:
        return x_BCn.mean(-1)
    w_B1n = normalized_weights(weights, x_BCn.dtype).unsqueeze(1)
    # Not a matrix product, which autocast would run in half precision.
    return (without_outliers(x_BCn, weights) * w_B1n).sum(-1)


def covariance(x: Tensor, *, weights: Tensor | None = None) -> Tensor:
    r"""Return the covariance of n features of C channels.

    .. math::
        \Sigma = X \bar I X^T, \qquad \bar I = \tfrac1n (I - \tfrac1n \mathbf 1 \mathbf 1^T)

    It divides by n, as the paper does, and never forms the n×n matrix :math:`\bar I`. With weights
    w (divided by their sum), :math:`\Sigma = \sum_p w_p (x_p - \mu)(x_p - \mu)^T` with
    :math:`\mu = \sum_p w_p x_p`.

    Args:
        x: features ``(..., C, n)``: channels, then positions.
        weights: ``(..., n)``, boolean or non-negative. Positions of weight zero may contain anything,
            including NaN.

    Returns:
        ``(..., C, C)``, in float32 for half-precision input. Channels that are constant to
        within rounding give exact zeros.

    Example:
        >>> x = torch.tensor([[1.0, 3.0], [2.0, 2.0]])
        >>> covariance(x)
        tensor([[1.0000, 0.0000],
                [0.0000, 0.0000]])
    """
    check_features(x)
    if weights is not None:
        check_weights(weights, x)
    with autocast_off(x):
        x_BCn, weights_Bn = as_batch(x, weights)
        m_BCn, s = center(x_BCn, weights_Bn)
        sigma_BCC = torch.bmm(m_BCn, m_BCn.mT) * (s * s)
        return sigma_BCC.reshape(*x.shape[:-1], x.shape[-2])


def as_batch(x: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Merge all leading dimensions, in float32 at least: ``(B, C, n)`` and ``(B, n)``."""
    x = at_least_float32(x)
    x_BCn = x.reshape(-1, *x.shape[-2:]) if x.ndim != 3 else x
    return x_BCn, None if weights is None else weights.reshape(-1, weights.shape[-1])


def second_moment(x: Tensor, *, weights: Tensor | None = None) -> Tensor:
    r"""Return the mean outer product of n features of C channels.

    .. math::
        P = \tfrac1n X X^T = \Sigma + \mu \mu^T

    With weights w (divided by their sum), :math:`P = \sum_p w_p x_p x_p^T`.

    Args:
        x: features ``(..., C, n)``: channels, then positions.
        weights: ``(..., n)``, boolean or non-negative. Positions of weight zero may contain anything,
            including NaN.

    Returns:
        ``(..., C, C)``, in float32 for half-precision input.

    Example:
        >>> second_moment(torch.tensor([[1.0, 3.0], [2.0, 2.0]]))
        tensor([[5., 4.],
                [4., 4.]])
    """
    check_features(x)
    if weights is not None:
        check_weights(weights, x)
    with autocast_off(x):
        x_BCn, weights_Bn = as_batch(x, weights)
        if weights_Bn is None:
            p_BCC = torch.bmm(x_BCn, x_BCn.mT) / x.shape[-1]
        else:
            x_BCn = without_outliers(x_BCn, weights_Bn)
            w_B1n = normalized_weights(weights_Bn, x_BCn.dtype).unsqueeze(1)
            p_BCC = torch.bmm(x_BCn * w_B1n, x_BCn.mT)
        return p_BCC.reshape(*x.shape[:-1], x.shape[-2])


def triu_vec(c: Tensor) -> Tensor:
    """The upper triangle with its diagonal, row by row: the d(d+1)/2 numbers the classifier sees.

    Off-diagonal entries are not scaled, as in the paper.

    Args:
        c: symmetric matrices ``(..., d, d)``; the lower triangle is not read.

    Returns:
        ``(..., d(d+1)/2)``.

    Example:
        >>> triu_vec(torch.tensor([[1.0, 2.0], [2.0, 3.0]]))
        tensor([1., 2., 3.])
    """
    check_square("c", c)
    return upper_triangle(c).squeeze(-2)


def triu_unvec(v: Tensor) -> Tensor:
    """The symmetric matrix whose upper triangle is ``v``: the inverse of :func:`triu_vec`.

    Args:
        v: ``(..., d(d+1)/2)``.

    Returns:
        ``(..., d, d)``.

    Example:
        >>> triu_unvec(torch.tensor([1.0, 2.0, 3.0]))
        tensor([[1., 2.],
                [2., 3.]])
    """
    check_floating("v", v)
    length = v.shape[-1] if v.ndim else 0
    d = (math.isqrt(8 * length + 1) - 1) // 2
    if d == 0 or d * (d + 1) // 2 != length:
        raise UsageError(f"v must have d(d+1)/2 entries for some d >= 1 in its last dimension; got {length}")
    return v.index_select(-1, _indices(v, d).square).reshape(*v.shape[:-1], d, d)


def upper_triangle(c: Tensor) -> Tensor:
    """Return the upper triangle of ``(..., d, d)`` as ``(..., 1, d(d+1)/2)``."""
    return c.flatten(-2).index_select(-1, _indices(c, c.shape[-1]).triangle).unsqueeze(-2)


def twice_symmetric(grad: Tensor, d: int) -> Tensor:
    """Return G + Gᵀ of the gradient of c, ``(B, d, d)``, given that of ``upper_triangle(c)``."""
    entries = grad.squeeze(-2).index_select(-1, _indices(grad, d).square)
    g = entries.reshape(*entries.shape[:-1], d, d)
    g.diagonal(dim1=-2, dim2=-1).mul_(2.0)
    return g


class _Indices(NamedTuple):
    """Where the entries of a triangle are in the flattened matrix, and the reverse for all d² entries."""

    triangle: Tensor
    square: Tensor


def _indices(like: Tensor, d: int) -> _Indices:
    # A graph must contain its indices, and fake tensors of a trace must not outlive it.
    if torch.compiler.is_compiling() or type(like) is not Tensor:
        return _new_indices(d, like.device)
    return _known_indices(d, like.device)


@functools.lru_cache(maxsize=16)
def _known_indices(d: int, device: torch.device) -> _Indices:
    with torch.inference_mode(False):
        return _new_indices(d, device)


def _new_indices(d: int, device: torch.device) -> _Indices:
    row, column = torch.triu_indices(d, d, device=device)
    i = torch.arange(d, device=device).unsqueeze(-1)
    low, high = torch.minimum(i, i.mT), torch.maximum(i, i.mT)
    return _Indices(row * d + column, (low * d - low * (low - 1) // 2 + high - low).flatten())


def normalized_weights(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return weights divided by their sum; zeros where all are zero; NaN where one is negative."""
    w = weights.to(dtype)
    w = torch.where(w < 0, torch.nan, w)
    # Divide by the largest first, so that no sum overflows; the derivative does not depend on it.
    largest = w.detach().amax(-1, keepdim=True)
    w = w / torch.where(largest == 0, 1.0, largest)
    total = w.sum(-1, keepdim=True)
    return torch.where(total == 0, 0.0, w / torch.where(total == 0, 1.0, total))


def without_outliers(x: Tensor, weights: Tensor | None) -> Tensor:
    """Return ``x`` with zeros at positions of weight zero, which may contain anything, including NaN.

    Without weights, it is ``x`` itself.

    If the weights are numbers, features of ordinary size stay: the derivative with respect to their weight
    depends on them.
    """
    if weights is None:
        return x
    hidden_B1n = (weights == 0).unsqueeze(1)
    if weights.dtype == torch.bool:
        return x.masked_fill(hidden_B1n, 0.0)
    size_BCn = x.detach().abs()
    largest_B11 = size_BCn.masked_fill(hidden_B1n, 0.0).amax((1, 2), keepdim=True)
    return x.masked_fill(hidden_B1n & ~(size_BCn < OUTLIER * largest_B11), 0.0)


def center(x: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ``(m, s)`` with ``m mᵀ · s²`` the (weighted) covariance of ``x``."""
    if weights is None:
        if x.requires_grad and torch.is_grad_enabled():
            # torch.compile cannot trace a Function with a jvp.
            centering = _Centering if torch.compiler.is_compiling() else _CenteringWithJvp
            m, s, _ = centering.apply(x)  # type: ignore[no-untyped-call]
        else:
            m, s, _ = _uniform(x)
        return m, s / x.shape[-1] ** 0.5
    return _weighted(x, weights)


def _uniform(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Two reductions, because torch.aminmax takes three times as long on a CPU.
    low, high = x.amin(-1, keepdim=True).detach(), x.amax(-1, keepdim=True).detach()
    scale, s = _scale(low, high)
    shifted = x - low
    return shifted.sub_(shifted.mean(-1, keepdim=True)).mul_(scale), s, scale


def _scale(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factor ``1/s`` of each channel, zero where it is constant, and s, ``(B, 1, 1)``.

    A constant image has s = 0 and factors 0, so its M is zero. NaN and Inf make their own image NaN, and no
    other.
    """
    spread, magnitude = high - low, torch.maximum(high, -low)
    finfo = torch.finfo(spread.dtype)
    # A spread below the smallest normal number has no reciprocal and counts as constant.
    flat = spread <= (FLAT_ULPS * finfo.eps * magnitude).clamp_min(finfo.tiny)
    s = spread.masked_fill(flat, 0.0).amax(-2, keepdim=True)
    return s.reciprocal().masked_fill(flat, 0.0), s


class _Centering(Function):
    """x to (m, s, scale), linear in x: gradient (Eqn. 11) and tangent are the same map."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _uniform(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, s, scale = output
        ctx.mark_non_differentiable(s, scale)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        scale: Tensor = ctx.saved_tensors[0]
        grad = grads[0]
        if grad is None:
            return None
        mean = grad.mean(-1, keepdim=True)
        if may_overwrite(grad, scale):
            # m is internal to this package, so its gradient was computed for this call only.
            return grad.sub_(mean).mul_(scale)
        return (grad - mean) * scale


class _CenteringWithJvp(_Centering):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _Centering.setup_context(ctx, inputs, output)
        ctx.save_for_forward(output[2])

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> tuple[Tensor, None, None]:
        (scale,) = ctx.saved_tensors
        return (tangent - tangent.mean(-1, keepdim=True)) * scale, None, None


def _weighted(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Center with weights: plain operations, differentiable in x and in the weights."""
    w = normalized_weights(weights, x.dtype).unsqueeze(-2)
    keep = w > 0
    low = x.detach().masked_fill(~keep, torch.inf).amin(-1, keepdim=True)
    high = x.detach().masked_fill(~keep, -torch.inf).amax(-1, keepdim=True)
    empty = low > high  # no position kept at all
    scale, s = _scale(low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0))
    # Shift by the feature of the largest weight, not by the minimum: an outlier of tiny weight may be the
    # minimum, and would cost the other features their digits.
    heaviest = w.argmax(-1, keepdim=True).expand(-1, x.shape[-2], -1)
    shift = x.detach().gather(-1, heaviest).masked_fill(empty, 0.0)
    # Masked features may be NaN, Inf or 1e38, and must not enter a product, not even times zero.
    shifted = torch.where(keep, x - shift, _tame(x - shift, OUTLIER_SPREADS * s))
    # The mean of a constant channel's shifted features is rounding error, which may be huge in units of s
    # (6e4 at a spread of 1e-7). Use the shift as its mean, or positions of weight zero would carry the error.
    mean = (shifted * w).sum(-1, keepdim=True).masked_fill(scale == 0, 0.0)
    # A channel that is constant where it counts may vary at positions of weight zero, and then determines the
    # derivative with respect to those weights. So its factor is zero only where it counts.
    scale = torch.where(keep, scale, reciprocal_or_zero(s))
    return (shifted - mean) * scale * _differentiable_root(w, weights), s


def _tame(x: Tensor, limit: Tensor) -> Tensor:
    x = torch.where(x.isfinite(), x, 0.0)
    return torch.minimum(torch.maximum(x, -limit), limit)


def _differentiable_root(w: Tensor, weights: Tensor) -> Tensor:
    """Return √w with a finite and correct derivative at w = 0.

    The floor is too small to change a product (it is eps²/n). The gradient that reaches it is proportional to
    its root, so that the quotient is the derivative at zero.
    """
    if not weights.is_floating_point():
        return w.sqrt()
    floor = torch.finfo(w.dtype).eps ** 2 / w.shape[-1]
    return torch.where(w > 0, w, w + floor).sqrt()
