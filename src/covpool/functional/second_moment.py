"""The second moment of features over positions: bilinear pooling, the covariance without centring."""

from __future__ import annotations

import torch
from torch import Tensor

from covpool.functional.arguments import check_features, check_weights
from covpool.functional.covariance import as_batch
from covpool.functional.precision import autocast_off
from covpool.functional.weighting import normalized_weights, without_outliers


def second_moment(x: Tensor, *, weights: Tensor | None = None) -> Tensor:
    r"""Mean outer product of n features of C channels.

    .. math::
        P = \tfrac1n X X^T = \Sigma + \mu \mu^T

    With weights w (divided by their sum), :math:`P = \sum_p w_p x_p x_p^T`.

    Args:
        x: features ``(..., C, n)``: channels, then positions.
        weights: ``(..., n)``, a bool mask or numbers >= 0. Positions of weight zero may hold anything,
            NaN included.

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
