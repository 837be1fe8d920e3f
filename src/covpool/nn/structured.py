r"""The paper's meta-layer in its three structured layers (section 3.2), each a module of its own.

    >>> from covpool.functional import covariance, matrix_sqrt
    >>> x = torch.randn(2, 8, 49)
    >>> a, t = PreNormalization()(covariance(x))
    >>> c = PostCompensation()(NewtonSchulz()(a), t)
    >>> torch.allclose(c, matrix_sqrt(covariance(x)), atol=1e-6)
    True

They are for looking inside and for ablations; :func:`covpool.functional.isqrt_cov` is the same function in
one piece, with a leaner gradient. Shapes: matrices ``(..., m, m)``, t ``(..., 1, 1)``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from covpool.arguments import check_choice
from covpool.errors import UsageError
from covpool.functional.newton_schulz import Iteration, newton_schulz, step_coefficients
from covpool.functional.numerics import (
    NORMALIZATIONS,
    Normalization,
    at_least_float32,
    autocast_off,
    check_floating,
    check_square,
    largest_entry,
    norm_of,
    reciprocal_or_zero,
    root_or_zero,
)


class PreNormalization(nn.Module):
    r"""Eqn. (3): :math:`A = \Sigma/t` with :math:`t = \operatorname{tr}\Sigma` or :math:`\|\Sigma\|_F`.

    Returns ``(A, t)``. It makes the iteration converge, for then :math:`\|A - I\| < 1` on the range of
    A. A zero matrix gives zero.
    """

    def __init__(self, normalization: Normalization = "trace") -> None:
        super().__init__()
        check_choice("normalization", normalization, NORMALIZATIONS)
        self.normalization: Normalization = normalization

    def forward(self, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """``(..., m, m)`` to ``(..., m, m)`` and ``(..., 1, 1)``."""
        check_square("sigma", sigma)
        with autocast_off(sigma):
            sigma = at_least_float32(sigma)
            unit = largest_entry(sigma)
            sigma = sigma * reciprocal_or_zero(unit)
            t = norm_of(sigma, self.normalization)
            return sigma * reciprocal_or_zero(t), t * unit

    def extra_repr(self) -> str:
        """The norm."""
        return f"normalization={self.normalization!r}"


class NewtonSchulz(nn.Module):
    r"""Eqn. (2), K times, or the fitted iteration (the default).

    From :math:`Y_0 = A` and :math:`Z_0 = I`, ``iteration="paper"`` computes

    .. math::
        Y_k = \tfrac12 Y_{k-1} (3I - Z_{k-1} Y_{k-1}), \qquad
        Z_k = \tfrac12 (3I - Z_{k-1} Y_{k-1}) Z_{k-1} .

    ``"fitted"`` has other coefficients in every step. Both arguments are those of
    :func:`covpool.functional.matrix_sqrt`. Returns :math:`Y_K \approx A^{1/2}`. It acts on ½(A + Aᵀ), so its
    gradient is symmetric.
    """

    def __init__(self, iteration: Iteration = "fitted", steps: int | None = None) -> None:
        super().__init__()
        self.iteration: Iteration = iteration
        self.steps = len(step_coefficients(iteration, steps, torch.float64))

    def forward(self, a: Tensor) -> Tensor:
        """``(..., m, m)`` of norm at most 1 to ``(..., m, m)``."""
        check_square("a", a)
        with autocast_off(a):
            a_Bmm = at_least_float32(a).reshape(-1, *a.shape[-2:])
            coefficients = step_coefficients(self.iteration, self.steps, a_Bmm.dtype)
            y_Bmm, _ = newton_schulz((a_Bmm + a_Bmm.mT) * 0.5, coefficients)
            return y_Bmm.reshape(a.shape)

    def extra_repr(self) -> str:
        """The iteration and the number of steps."""
        return f"iteration={self.iteration!r}, steps={self.steps}"


class PostCompensation(nn.Module):
    r"""Eqn. (4): :math:`C = \sqrt t \, Y_K`, which undoes the pre-normalization.

    Where t is zero, so are C and every gradient.
    """

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        """``(..., m, m)`` and ``(..., 1, 1)`` to ``(..., m, m)``."""
        check_square("y", y)
        check_floating("t", t)
        if t.shape[-2:] != (1, 1):
            raise UsageError(f"t must be (..., 1, 1), as PreNormalization returns it; got {tuple(t.shape)}")
        with autocast_off(y):
            return at_least_float32(y) * root_or_zero(t)
