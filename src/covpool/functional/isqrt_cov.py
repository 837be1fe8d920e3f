"""iSQRT-COV: the square root of the covariance of features, in one differentiable operator.

The iteration runs on either side of the features. Let M be the centered features ``(B, C, n)``, t the norm of
``M Mᵀ``, ``A = M Mᵀ/t`` (C×C) and ``G = Mᵀ M/t`` (n×n). Every iterate is a polynomial, so

.. math::  Y_K(A) = A Z_K(A) = M Z_K(G) M^T / t ,

and the smaller matrix gives the same result. Both have the same trace and the same Frobenius norm, so both
normalizations work on both sides.

Both sides return ``C = s · t^p · Y_K``. The factor s undoes the scale that centering removed. The exponent
p = ½ is the paper's post-compensation; without it, p = 0 and s = 1.

Products in addition to the iteration's: channels 1 + 1 (value + gradient), positions 3 + 4.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from covpool.arguments import check_choice
from covpool.functional.covariance import as_batch, center, twice_symmetric, upper_triangle
from covpool.functional.matrix_sqrt import BACKWARDS, Backward
from covpool.functional.newton_schulz import Coefficients, Iteration, accumulate, step_coefficients
from covpool.functional.numerics import (
    COMPENSATIONS,
    NORMALIZATIONS,
    Compensation,
    Normalization,
    autocast_off,
    check_features,
    check_weights,
    in_units_of_norm,
    is_dual,
    may_overwrite,
    reciprocal_or_zero,
)
from covpool.functional.scaled_root import (
    Root,
    Rule,
    differentiable,
    dot,
    scaled_root,
    scaled_root_backward,
    scaled_root_jvp,
)

Side = Literal["auto", "channels", "positions"]
SIDES = ("auto", "channels", "positions")
COMPUTE_DTYPES = (None, torch.bfloat16, torch.float16)


def isqrt_cov(
    x: Tensor,
    *,
    iteration: Iteration = "fitted",
    steps: int | None = None,
    normalization: Normalization = "trace",
    compensation: Compensation = "matched",
    weights: Tensor | None = None,
    side: Side = "auto",
    backward: Backward = "saved",
    compute_dtype: torch.dtype | None = None,
    vector: bool = False,
) -> Tensor:
    r"""Square root of the covariance of features by Newton-Schulz iteration (iSQRT-COV).

    This is the meta-layer of the paper (iSQRT-COV, CVPR 2018), :math:`C = \sqrt t \, Y_K(\Sigma/t)` with
    :math:`\Sigma = X \bar I X^T`: :func:`matrix_sqrt` of :func:`covariance`, with the same arguments and
    defaults. It runs on the smaller of the C×C covariance and the n×n Gram matrix, to the same result.

    Args:
        x: features ``(..., C, n)``: channels, then positions.
        iteration: ``"fitted"``, with almost the result of the paper's 5 steps, or ``"paper"``.
        steps: K, the number of steps (N in the paper). ``"fitted"`` has 3 (default) or 4. ``"paper"`` has 5
            by default, at most 15 in float32 and 40 in float64: see :func:`matrix_sqrt`.
        normalization: ``"trace"`` or ``"frobenius"``.
        compensation: ``"matched"`` (the paper's √t) or ``"none"``.
        weights: ``(..., n)``, boolean or non-negative, divided by their sum. Positions of weight zero may
            contain anything, including NaN.
        side: ``"channels"``, ``"positions"``, or ``"auto"`` for the one with fewer multiplications.
        backward: ``"saved"`` saves the iterates for backward, ``"recompute"`` only the centered features.
        compute_dtype: ``torch.bfloat16`` or ``torch.float16`` runs the iteration and its gradient in half
            precision. At 5 steps the error is about 1 % in bfloat16 and 0.1 % in float16. bfloat16 allows at
            most 8 steps, float16 10. Centering, norm and compensation stay in float32. Without
            ``compute_dtype``, products obey ``torch.set_float32_matmul_precision``, as all of torch's do.
        vector: whether to return the upper triangle, as :func:`triu_vec` does, with a faster gradient.

    Returns:
        ``(..., C, C)``, symmetric to rounding, or ``(..., C(C+1)/2)`` with ``vector``; in float32 for
        half-precision input. Zero, with zero gradient, where the covariance is zero.

    Example:
        >>> x = torch.randn(8, 256, 196)
        >>> isqrt_cov(x).shape
        torch.Size([8, 256, 256])
    """
    check_features(x)
    check_choice("normalization", normalization, NORMALIZATIONS)
    check_choice("compensation", compensation, COMPENSATIONS)
    check_choice("side", side, SIDES)
    check_choice("backward", backward, BACKWARDS)
    check_choice("compute_dtype", compute_dtype, COMPUTE_DTYPES)
    if weights is not None:
        check_weights(weights, x)
    with autocast_off(x):
        x_BCn, weights_Bn = as_batch(x, weights)
        dtype = compute_dtype or x_BCn.dtype
        coefficients = step_coefficients(iteration, steps, dtype)
        if side == "auto":
            side = cheaper_side(x.shape[-2], _to_choose_by(x.shape[-1]), len(coefficients))
        operator = _covariance_root(
            coefficients, normalization, compensation, side == "positions", dtype, vector
        )
        m_BCn, s = center(x_BCn, weights_Bn)
        tangent, after = False, None
        if compute_dtype == torch.float16:
            # Features of norm 1, and their scale after the products: float16 has a small range. So a tangent
            # needs the Function too, which scales it.
            m_BCn, size = in_units_of_norm(m_BCn)
            tangent = not torch.compiler.is_compiling() and is_dual(m_BCn)
            if compensation == "matched":
                s, after = torch.ones_like(s), s * size
        c = s if compensation == "matched" else torch.ones_like(s)
        result = differentiable(m_BCn, c, operator, backward == "saved", tangent)
        if after is not None:
            result = result * after
        return result.reshape(*x.shape[:-2], *(result.shape[2:] if vector else result.shape[1:]))


def cheaper_side(channels: int, positions: int, steps: int) -> Literal["channels", "positions"]:
    """Return the side with fewer multiplications in value and gradient together."""
    c, n = channels, positions
    iteration = 7 * steps - 7
    if steps == 1:  # Y_1 = ½A(3I − A) takes a product each way, Z_1 = ½(3I − A) none
        return "positions" if 5 * n * n * c < 2 * c * c * c else "channels"
    on_positions = iteration * n * n * n + 5 * n * n * c
    on_channels = iteration * c * c * c
    return "positions" if on_positions < on_channels else "channels"


def positions_kernel(
    m: Tensor,
    s: Tensor,
    coefficients: Coefficients,
    normalization: Normalization,
    compensation: Compensation,
) -> Tensor:
    """Return the n×n matrix K with ``C = m K mᵀ``, for centered features m and their scale s."""
    c = s if compensation == "matched" else torch.ones_like(s)
    return _covariance_root(coefficients, normalization, compensation, True, m.dtype).root(m, c).value


def _to_choose_by(positions: int) -> int:
    """Return the number of positions; of a dynamic size in torch.export, the example's.

    A comparison with the dynamic size would restrict it to sizes for which the same side is cheaper.
    """
    if torch.compiler.is_exporting() and isinstance(positions, torch.SymInt):
        from torch.fx.experimental import symbolic_shapes

        # New in torch 2.12; earlier releases have the attribute alone.
        hint = getattr(symbolic_shapes, "guarding_hint_or_throw", lambda size: size.node.hint)
        return int(hint(positions))
    return positions


def _covariance_root(
    coefficients: Coefficients,
    normalization: Normalization,
    compensation: Compensation,
    positions: bool,
    dtype: torch.dtype,
    vector: bool = False,
) -> _CovarianceRoot:
    power = 0.5 if compensation == "matched" else 0.0
    if positions:  # C is M Z_K Mᵀ/t
        power -= 1
    rule = Rule(coefficients, normalization, power, positions, dtype, triangle=vector and not positions)
    return _CovarianceRoot(rule, positions, vector)


class _CovarianceRoot(NamedTuple):
    """Centered features m to C, ``(B, C, C)``, or to its upper triangle, ``(B, 1, C(C+1)/2)``.

    On the channels side C is the scaled ``Y_K`` of ``M Mᵀ``. On the positions side it is ``M K Mᵀ``, with K
    the scaled ``Z_K`` of ``Mᵀ M``.
    """

    rule: Rule
    kernel: bool
    vector: bool

    def root(self, m: Tensor, unit: Tensor, keep: bool = False) -> Root:
        x = m.to(self.rule.dtype)
        gram = torch.bmm(x.mT, x) if self.kernel else torch.bmm(x, x.mT)
        return scaled_root(gram.to(m.dtype), unit, self.rule, keep)

    def result(self, m: Tensor, root: Root) -> Tensor:
        """Return C: 2 more products on the positions side."""
        if not self.kernel:
            return root.value
        x = m.to(self.rule.dtype)
        return self._entries(torch.bmm(torch.bmm(x, root.value.to(x.dtype)), x.mT)).to(m.dtype)

    def gradient(self, grad: Tensor, m: Tensor, unit: Tensor, root: Root) -> Tensor:
        """Return the gradient of m: Eqns. (5) to (10), and (11) up to centering."""
        # Twice the symmetric part of the gradient of C.
        g = twice_symmetric(grad, m.shape[1]) if self.vector else grad + grad.mT
        if self.rule.dtype != torch.float16:
            return self._gradient(g, grad, m, root)
        g, size = in_units_of_norm(g)  # linear in g
        return self._gradient(g, grad * reciprocal_or_zero(size), m, root) * size

    def _gradient(self, g: Tensor, grad: Tensor, m: Tensor, root: Root) -> Tensor:
        dtype = self.rule.dtype
        x, g = m.to(dtype), g.to(dtype)
        if not self.kernel:
            inner = 2 * dot(grad, root.value)
            d = scaled_root_backward(g, inner, root, self.rule)
            return torch.bmm(d.to(dtype), x).to(m.dtype)
        kernel = root.value.to(dtype)
        gx = torch.bmm(g, x)
        h = torch.bmm(x.mT, gx)
        grad_x = torch.bmm(gx, kernel)
        inner = dot(h.to(m.dtype), root.value)
        d = scaled_root_backward(h, inner, root, self.rule).to(dtype)
        overwrite = may_overwrite(grad_x, d)
        return accumulate(grad_x, x, d, beta=1.0, alpha=1.0, overwrite=overwrite).to(m.dtype)

    def tangent(self, tangent: Tensor, m: Tensor, unit: Tensor, root: Root) -> Tensor:
        if self.rule.dtype != torch.float16:
            return self._tangent(tangent, m, root)
        tangent, size = in_units_of_norm(tangent)  # linear in the tangent
        return self._tangent(tangent, m, root) * size

    def _tangent(self, tangent: Tensor, m: Tensor, root: Root) -> Tensor:
        dtype = self.rule.dtype
        x, dx = m.to(dtype), tangent.to(dtype)
        half = (torch.bmm(x.mT, dx) if self.kernel else torch.bmm(dx, x.mT)).to(m.dtype)
        derivative = scaled_root_jvp(half + half.mT, root, self.rule)
        if not self.kernel:
            return derivative
        middle = torch.bmm(torch.bmm(x, derivative.to(dtype)), x.mT)
        outer = torch.bmm(torch.bmm(dx, root.value.to(dtype)), x.mT)
        return self._entries(middle + outer + outer.mT).to(m.dtype)

    def _entries(self, c: Tensor) -> Tensor:
        return upper_triangle(c) if self.vector else c
