"""A symmetric matrix as the vector of its upper triangle, and back."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from covpool.errors import UsageError
from covpool.functional.arguments import check_floating, check_square


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
