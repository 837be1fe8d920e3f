"""Mean, second moment and covariance of features, with optional weights."""

from __future__ import annotations

import torch
from torch import Tensor

from covpool.functional.arguments import check_features, check_weights
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
