"""Normalize matrices before the iteration, and vectors after it."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from covpool.functional.differentiable import may_overwrite

Normalization = Literal["trace", "frobenius"]
Compensation = Literal["matched", "none"]
NORMALIZATIONS = ("trace", "frobenius")
COMPENSATIONS = ("matched", "none")


def norm_of(a: Tensor, normalization: Normalization) -> Tensor:
    """``tr(A)`` or ``‖A‖_F`` of each matrix, ``(B, 1, 1)``."""
    if normalization == "trace":
        return a.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    norm: Tensor = torch.linalg.vector_norm(a, dim=(-2, -1), keepdim=True)
    return norm


def reciprocal_or_zero(t: Tensor) -> Tensor:
    """``1/t``, and 0 where t is 0: what makes the zero matrix a zero and not a NaN."""
    # Through 1/Inf rather than a choice after 1/0, whose derivative would be NaN.
    return t.masked_fill(t == 0, torch.inf).reciprocal()


def root_or_zero(t: Tensor) -> Tensor:
    """``√t``, whose derivative at 0 is 0 and not infinite."""
    zero = t == 0
    return t.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)


def largest_entry(a: Tensor) -> Tensor:
    """The unit in which no square of an entry overflows, ``(..., 1, 1)``; a constant of the derivative.

    Zero for subnormal matrices too: their largest entry has no reciprocal.
    """
    largest = a.detach().abs().amax((-2, -1), keepdim=True)
    return largest.masked_fill(largest < torch.finfo(a.dtype).tiny, 0.0)


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """``x · factor``, in x itself where that is allowed: x is consumed."""
    return x.mul_(factor) if may_overwrite(x, factor) else x * factor


def normalization_backward(
    grad_a: Tensor, a: Tensor, inner: Tensor, power: float, normalization: Normalization
) -> Tensor:
    r"""Gradient of ``l = f(t^p · R(S/t))`` with respect to S, times t: Eqns. (5), (8), (9) and (10) in one.

    .. math::
        t \frac{\partial l}{\partial S} = \frac{\partial l}{\partial A}
            + \Big(p \langle \tfrac{\partial l}{\partial C}, C\rangle
            - \langle \tfrac{\partial l}{\partial A}, A\rangle\Big) \frac{\partial t}{\partial S}

    with :math:`\partial t/\partial S = I` for the trace and ``A`` for the Frobenius norm.

    Args:
        grad_a: gradient of ``A = S/t``; consumed.
        a: A itself.
        inner: ``⟨∂l/∂C, C⟩``, ``(B, 1, 1)``, in the unit of ``grad_a``: the result is linear in the two.
        power: p, the exponent of t in the compensation: ½ for the root, −½ for the inverse root, 0 for none.
        normalization: which norm t is.
    """
    along = power * inner - (grad_a * a).sum((-2, -1), keepdim=True)
    if normalization == "trace":
        # The sum of a dense matrix and a multiple of I, without making the multiple of I.
        total = grad_a if may_overwrite(grad_a, along) else grad_a.clone()
        total.diagonal(dim1=-2, dim2=-1).add_(along.squeeze(-1))
        return total
    return torch.addcmul(grad_a, a, along)


def norm_jvp(tangent: Tensor, a: Tensor, normalization: Normalization) -> Tensor:
    """Directional derivative of t along ``tangent``, given ``A = S/t``."""
    if normalization == "trace":
        return norm_of(tangent, "trace")
    return (tangent * a).sum((-2, -1), keepdim=True)


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
