"""The iteration on either side of the features: C×C or n×n, value, gradient and tangent.

Let M be the centered features ``(B, C, n)``, t the norm of ``M Mᵀ``, ``A = M Mᵀ/t`` (C×C) and
``G = Mᵀ M/t`` (n×n). Every iterate is a polynomial, so

.. math::  Y_K(A) = A Z_K(A) = M Z_K(G) M^T / t ,

and the smaller matrix gives the same result. Both have the same trace and the same Frobenius norm, so both
normalizations work on both sides.

Both sides return ``C = s · t^p · Y_K``. The factor s undoes the scale that centering removed. The exponent
p = ½ is the paper's post-compensation; without it, p = 0 and s = 1.

Products in addition to the iteration's: channels 1 + 1 (value + gradient), positions 3 + 4.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from covpool.functional.differentiable import may_overwrite
from covpool.functional.newton_schulz import (
    Iterates,
    accumulate,
    newton_schulz,
    newton_schulz_backward,
    newton_schulz_jvp,
)
from covpool.functional.normalization import (
    Compensation,
    Normalization,
    norm_jvp,
    norm_of,
    normalization_backward,
    reciprocal_or_zero,
    root_or_zero,
    scaled,
)


class Options(NamedTuple):
    """Options of the operator; ``dtype`` is the dtype of the products."""

    steps: int
    normalization: Normalization
    compensation: Compensation
    positions: bool
    dtype: torch.dtype

    def power(self) -> float:
        """p, the exponent of t in the result."""
        return 0.5 if self.compensation == "matched" else 0.0


class Value(NamedTuple):
    """The tensors that the result and its derivatives are computed from.

    ``kernel`` is C on the channels side. On the positions side it is the scaled ``Z_K`` with
    ``C = M kernel Mᵀ``. ``factor`` is its scale.
    """

    t: Tensor
    factor: Tensor
    kernel: Tensor
    iterates: Iterates


def value(m: Tensor, s: Tensor, options: Options, keep: bool = False) -> Value:
    """Run the iteration on centered features m, ``(B, C, n)``; ``keep`` saves the iterates for backward."""
    x = m.to(options.dtype)
    gram = torch.bmm(x.mT, x) if options.positions else torch.bmm(x, x.mT)
    gram = gram.to(m.dtype)
    t = norm_of(gram, options.normalization)
    over_t = reciprocal_or_zero(t)
    a = scaled(gram, over_t).to(options.dtype)
    root, iterates = newton_schulz(a, options.steps, inverse=options.positions, keep=keep)
    factor = _factor(t, s, options)
    if options.positions:
        factor = factor * over_t
    kernel = scaled(root.to(m.dtype), factor)
    if options.positions:
        kernel = kernel.to(options.dtype)
    return Value(t, factor, kernel, iterates)


def result(m: Tensor, value: Value, options: Options) -> Tensor:
    """Return C: 2 more products on the positions side."""
    if not options.positions:
        return value.kernel
    x = m.to(options.dtype)
    return torch.bmm(torch.bmm(x, value.kernel), x.mT).to(m.dtype)


def _factor(t: Tensor, s: Tensor, options: Options) -> Tensor:
    if options.compensation == "none":
        return torch.ones_like(t)
    return root_or_zero(t) * s


def value_backward(grad: Tensor, m: Tensor, value: Value, options: Options) -> Tensor:
    """Return the gradient with respect to m: Eqns. (5) to (10), and (11) up to centering."""
    x = m.to(options.dtype)
    g = (grad + grad.mT).to(options.dtype)  # twice the symmetric part
    if options.positions:
        return _positions_backward(g, x, m.dtype, value, options)
    return _channels_backward(g, x, m.dtype, value, options)


def _channels_backward(g: Tensor, x: Tensor, dtype: torch.dtype, value: Value, options: Options) -> Tensor:
    inner = _dot(g, value.kernel, dtype) * reciprocal_or_zero(value.factor)
    grad_a = newton_schulz_backward(g, value.iterates).to(dtype)
    d = _gram_backward(grad_a, inner, options.power(), value, options)
    return torch.bmm(d.to(options.dtype), x).to(dtype)


def _positions_backward(g: Tensor, x: Tensor, dtype: torch.dtype, value: Value, options: Options) -> Tensor:
    gx = torch.bmm(g, x)
    h = torch.bmm(x.mT, gx)
    grad_x = torch.bmm(gx, value.kernel)
    inner = _dot(h, value.kernel, dtype) * reciprocal_or_zero(value.factor)
    grad_a = newton_schulz_backward(h, value.iterates, inverse=True).to(dtype)
    d = _gram_backward(grad_a, inner, options.power() - 1, value, options)
    overwrite = may_overwrite(grad_x, d)
    return accumulate(grad_x, x, d.to(options.dtype), beta=1.0, alpha=1.0, overwrite=overwrite).to(dtype)


def _gram_backward(grad_a: Tensor, inner: Tensor, power: float, value: Value, options: Options) -> Tensor:
    a = value.iterates.ys[0].to(grad_a.dtype)
    d = normalization_backward(grad_a, a, inner, power, options.normalization)
    return scaled(d, value.factor * reciprocal_or_zero(value.t))


def value_jvp(tangent: Tensor, m: Tensor, value: Value, options: Options) -> Tensor:
    """Return the directional derivative of C along a tangent of m."""
    x, dx = m.to(options.dtype), tangent.to(options.dtype)
    half = torch.bmm(x.mT, dx) if options.positions else torch.bmm(dx, x.mT)
    half = half.to(m.dtype)
    dgram = half + half.mT
    a = value.iterates.ys[0].to(m.dtype)
    over_t = reciprocal_or_zero(value.t)
    dt = norm_jvp(dgram, a, options.normalization)
    da = ((dgram - a * dt) * over_t).to(options.dtype)
    droot = newton_schulz_jvp(da, value.iterates, inverse=options.positions).to(m.dtype)
    if not options.positions:
        return droot * value.factor + value.kernel * (options.power() * dt * over_t)
    dkernel = droot * value.factor + value.kernel * ((options.power() - 1) * dt * over_t)
    middle = torch.bmm(torch.bmm(x, dkernel.to(options.dtype)), x.mT)
    outer = torch.bmm(torch.bmm(dx, value.kernel), x.mT)
    return (middle + outer + outer.mT).to(m.dtype)


def _dot(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return (a.to(dtype) * b.to(dtype)).sum((-2, -1), keepdim=True)
