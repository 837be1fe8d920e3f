"""The square root of positive semi-definite matrices and its inverse, by matrix products only."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from covpool.arguments import check_choice
from covpool.functional.newton_schulz import MOST_STEPS, PAPER_STEPS, Iteration, step_coefficients
from covpool.functional.numerics import (
    COMPENSATIONS,
    NORMALIZATIONS,
    Compensation,
    Normalization,
    at_least_float32,
    autocast_off,
    check_square,
    largest_entry,
    reciprocal_or_zero,
    root_or_zero,
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

Backward = Literal["saved", "recompute"]
BACKWARDS = ("saved", "recompute")


def matrix_sqrt(
    a: Tensor,
    *,
    iteration: Iteration = "fitted",
    steps: int | None = None,
    normalization: Normalization = "trace",
    compensation: Compensation = "matched",
    backward: Backward = "saved",
) -> Tensor:
    r"""Return the square root of positive semi-definite matrices by coupled Newton-Schulz iteration.

    The three layers of the paper, Eqns. (3), (2) and (4), with t the trace or the Frobenius norm:

    .. math::
        A &= \Sigma / t, \qquad Y_0 = A, \quad Z_0 = I \\
        Y_{k} &= \tfrac12 Y_{k-1} (3I - Z_{k-1} Y_{k-1}), \quad
        Z_{k} = \tfrac12 (3I - Z_{k-1} Y_{k-1}) Z_{k-1} \\
        C &= \sqrt t \, Y_K

    The default iteration replaces 3/2 and 1/2 by fitted coefficients, with almost the result of the paper's 5
    steps in 3. It takes 6 products forward and 8 backward; 5 steps take 12 and 16. It acts on ½(a + aᵀ), so
    its gradient is symmetric.

    Args:
        a: ``(..., m, m)``, positive semi-definite. A zero matrix gives zero, with zero gradient. A result
            whose norm is too large for a root becomes NaN. Then a is not positive semi-definite, or its
            rounding errors are too large for the number of steps; :func:`root_report` tells which.
        iteration: ``"fitted"``, with almost the result of the paper's 5 steps, or ``"paper"``.
        steps: K, the number of steps (N in the paper). ``"fitted"`` has 3 (default) or 4, ``"paper"`` 5 by
            default. More steps come closer to the root, but each multiplies rounding errors on the null
            space, by 1.5 in the value and by 2.25 in the gradient. So the paper's iteration has at most 15
            in float32, where the gradient of a singular matrix is off by up to 0.1 %, and 40 in float64.
        normalization: ``"trace"`` or ``"frobenius"``.
        compensation: ``"matched"`` multiplies by √t; ``"none"`` returns the root of a/t.
        backward: ``"saved"`` saves the iterates for backward; ``"recompute"`` saves only ``a`` and runs the
            iteration again.

    Returns:
        ``(..., m, m)``, in float32 for half-precision input.

    Example:
        >>> a = torch.diag(torch.tensor([4.0, 1.0]))
        >>> matrix_sqrt(a, iteration="paper", steps=10)
        tensor([[2.0000, 0.0000],
                [0.0000, 1.0000]])
    """
    return _root(a, iteration, steps, normalization, compensation, backward, inverse=False)


def inverse_matrix_sqrt(
    a: Tensor,
    *,
    iteration: Iteration = "fitted",
    steps: int | None = None,
    normalization: Normalization = "trace",
    compensation: Compensation = "matched",
    backward: Backward = "saved",
) -> Tensor:
    r"""Return the inverse square root of positive definite matrices: :math:`Z_K/\sqrt t` of the iteration.

    See :func:`matrix_sqrt` for the equations and arguments. On the null space of a singular matrix the result
    grows with K (as 1.5^K with the paper's steps), and is never infinite. The zero matrix gives zero.

    Example:
        >>> a = torch.diag(torch.tensor([4.0, 1.0]))
        >>> inverse_matrix_sqrt(a, iteration="paper", steps=10)
        tensor([[0.5000, 0.0000],
                [0.0000, 1.0000]])
    """
    return _root(a, iteration, steps, normalization, compensation, backward, inverse=True)


def _root(
    a: Tensor,
    iteration: Iteration,
    steps: int | None,
    normalization: Normalization,
    compensation: Compensation,
    backward: Backward,
    inverse: bool,
) -> Tensor:
    check_square("a", a)
    check_choice("normalization", normalization, NORMALIZATIONS)
    check_choice("compensation", compensation, COMPENSATIONS)
    check_choice("backward", backward, BACKWARDS)
    with autocast_off(a):
        a_Bmm = at_least_float32(a).reshape(-1, *a.shape[-2:])
        coefficients = step_coefficients(iteration, steps, a_Bmm.dtype)
        power = 0.0 if compensation == "none" else -0.5 if inverse else 0.5
        rule = Rule(coefficients, normalization, power, inverse, a_Bmm.dtype, checked=True)
        # Dividing by the largest entry prevents overflow. The result does not depend on it.
        unit = largest_entry(a_Bmm)
        root_Bmm = differentiable(a_Bmm, unit, MatrixRoot(rule), backward == "saved", tangent=False)
        return root_Bmm.reshape(a.shape)


class MatrixRoot(NamedTuple):
    """The root of ``½(a + aᵀ)``, computed in units of its largest entry."""

    rule: Rule
    kernel: bool = False

    def root(self, a: Tensor, unit: Tensor, keep: bool = False) -> Root:
        """Return R of a; ``unit`` is its largest entry."""
        if self.rule.power:
            c = root_or_zero(reciprocal_or_zero(unit) if self.rule.inverse else unit)
        else:
            c = (unit != 0).to(a.dtype)
        return scaled_root(self._symmetric(a, unit), c, self.rule, keep)

    def result(self, a: Tensor, root: Root) -> Tensor:
        """Return R."""
        return root.value

    def gradient(self, grad: Tensor, a: Tensor, unit: Tensor, root: Root) -> Tensor:
        """Return the gradient of a, which is symmetric."""
        g = (grad + grad.mT) * 0.5
        return scaled_root_backward(g, dot(g, root.value), root, self.rule) * reciprocal_or_zero(unit)

    def tangent(self, tangent: Tensor, a: Tensor, unit: Tensor, root: Root) -> Tensor:
        """Return the directional derivative of R."""
        return scaled_root_jvp(self._symmetric(tangent, unit), root, self.rule)

    def _symmetric(self, a: Tensor, unit: Tensor) -> Tensor:
        return (a + a.mT) * (0.5 * reciprocal_or_zero(unit))


class RootReport(NamedTuple):
    """Whether matrices have a square root that :func:`matrix_sqrt` can compute, and with how many steps.

    Attributes:
        asymmetry: largest difference of a and its transpose, relative to the largest entry.
        smallest: smallest eigenvalue, relative to the trace; at least 0 for a covariance, up to rounding.
        most_steps: the most steps of the paper's iteration after which negative eigenvalues change the
            result by at most 1 %; 0 if one step is too many. It is at most the limit of the dtype. The
            fitted steps are as sensitive as 5 of the paper's.
    """

    asymmetry: float
    smallest: float
    most_steps: int

    @property
    def fit(self) -> bool:
        """Return whether the default iteration, and 5 steps of the paper's, suit the matrices."""
        return self.asymmetry < 0.01 and self.most_steps >= PAPER_STEPS

    def __str__(self) -> str:
        """Return the report in sentences."""
        parts = [f"smallest eigenvalue: {self.smallest:.1e} of the trace"]
        if not self.asymmetry < 0.01:
            parts.append(f"not symmetric: off by {self.asymmetry:.1e} of the largest entry")
        if self.most_steps == 0:
            parts.append("not positive semi-definite: it has no square root")
        else:
            parts.append(f'use at most {self.most_steps} steps of iteration="paper"')
        return "; ".join(parts)


def root_report(a: Tensor) -> RootReport:
    """Report whether matrices are fit for :func:`matrix_sqrt`, by their eigenvalues.

    The report is that of the worst matrix.

    A covariance that was rounded, to bfloat16 for example, has negative eigenvalues, which grow by 1.5 or
    more at every step.

    Args:
        a: ``(..., m, m)``.

    Example:
        >>> print(root_report(torch.diag(torch.tensor([4.0, 1.0, -1e-3]))))
        smallest eigenvalue: -2.0e-04 of the trace; use at most 9 steps of iteration="paper"
        >>> root_report(torch.diag(torch.tensor([4.0, -1.0]))).fit
        False
    """
    check_square("a", a)
    most = MOST_STEPS[torch.promote_types(a.dtype, torch.float32)]
    a_Bmm = a.detach().double().cpu().reshape(-1, *a.shape[-2:])
    if not a_Bmm.isfinite().all():
        return RootReport(math.nan, math.nan, 0)
    a_Bmm = a_Bmm * reciprocal_or_zero(largest_entry(a_Bmm))
    values = torch.linalg.eigvalsh((a_Bmm + a_Bmm.mT) * 0.5)
    values = values / root_or_zero(values.sum(-1, keepdim=True).square()).clamp_min(1e-300)
    asymmetry = float((a_Bmm - a_Bmm.mT).abs().max())
    steps = min(_steps_of(row, most) for row in values)
    return RootReport(asymmetry, float(values.min()), steps)


def _steps_of(eigenvalues: Tensor, most: int) -> int:
    """Return the number of steps after which the negative ones of some eigenvalues count up to 1 %."""
    y = w = eigenvalues
    for step in range(most + 1):
        if not y.clamp(max=0.0).norm() <= 0.01 * y.clamp(min=0.0).norm():
            return max(step - 1, 0)
        t = 1.5 - 0.5 * w
        y, w = y * t, w * t * t
    return most
