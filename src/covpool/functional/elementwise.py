"""The two steps that bilinear pooling ends with: the signed root of every entry, and unit length.

Both give zero for zero, with a derivative of zero there, unless the root is made less steep.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from covpool.functional.normalization import largest_entry, reciprocal_or_zero, root_or_zero


def signed_root(p: Tensor, *, eps: float = 0.0) -> Tensor:
    r""":math:`\operatorname{sign}(p) (\sqrt{|p| + \epsilon} - \sqrt\epsilon)` of every entry.

    Without ε its derivative grows without bound towards zero; at zero itself it is taken as zero.

    Example:
        >>> signed_root(torch.tensor([4.0, 0.0, -9.0]))
        tensor([ 2.,  0., -3.])
        >>> signed_root(torch.tensor([3.0, 0.0, -8.0]), eps=1.0)
        tensor([ 1.,  0., -2.])
    """
    if eps:
        # The same, without a difference of equal numbers.
        return p / ((p.abs() + eps).sqrt() + math.sqrt(eps))
    return p.sign() * root_or_zero(p.abs())


def l2_normalized(v: Tensor) -> Tensor:
    r""":math:`v / \|v\|_2` over the last dimension, whatever the scale of v; zero for zero.

    A vector of subnormal numbers alone counts as zero.

    Example:
        >>> l2_normalized(torch.tensor([[3e30, 4e30], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    v = in_units_of_largest(v.unsqueeze(-2)).squeeze(-2)
    norm: Tensor = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    return v * reciprocal_or_zero(norm)


def in_units_of_largest(x: Tensor) -> Tensor:
    """``x`` divided by the largest absolute entry of its last two dimensions; zero for zero.

    The divisor is a constant of the derivative: for what is the same at every scale of x, and there alone,
    the derivative is whole.
    """
    return x * reciprocal_or_zero(largest_entry(x))
