"""Mean, second moment and covariance of features, and symmetric matrices as vectors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from covpool.errors import UsageError
from covpool.functional.arguments import check_features, check_floating, check_square, check_weights
from covpool.functional.centering import center, normalized_weights, without_outliers
from covpool.functional.differentiable import at_least_float32, autocast_off


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
        \Sigma = X \bar I X^T, \qquad \bar I = \tfrac1n (I - \tfrac1n \mathbf 1)

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
    d = c.shape[-1]
    row, column = torch.triu_indices(d, d, device=c.device)
    return c.flatten(-2).index_select(-1, row * d + column)


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
    row = torch.arange(d, device=v.device).unsqueeze(-1)
    low, high = torch.minimum(row, row.mT), torch.maximum(row, row.mT)
    position = low * d - low * (low - 1) // 2 + high - low
    return v.index_select(-1, position.flatten()).reshape(*v.shape[:-1], d, d)
