"""Correlation pooling: the square root of the correlation matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from covpool.arguments import check_positive
from covpool.functional.covariance import as_batch, center, triu_vec
from covpool.functional.matrix_sqrt import matrix_sqrt
from covpool.functional.newton_schulz import Iteration, step_coefficients
from covpool.functional.numerics import (
    autocast_off,
    check_features,
    check_weights,
    reciprocal_or_zero,
    root_or_zero,
)
from covpool.nn.pooling.method import Method


@dataclass(frozen=True)
class CorrelationOptions:
    """The iteration of the root, and a floor of the variances.

    Attributes:
        iteration: ``"fitted"`` or ``"paper"``, as in :func:`covpool.functional.matrix_sqrt`.
        steps: number of steps: 3 or 4 fitted ones, 3 by default; any number of the paper's, 5 by default.
            ``None`` becomes the default.
        eps: added to every variance, relative to their mean.
    """

    iteration: Iteration = "fitted"
    steps: int | None = None
    eps: float = 1e-5

    def __post_init__(self) -> None:
        coefficients = step_coefficients(self.iteration, self.steps, torch.float64)
        object.__setattr__(self, "steps", len(coefficients))
        check_positive("eps", self.eps)


class Correlation(Method):
    r"""The square root of the correlation matrix, as a vector of d(d+1)/2 values.

    .. math::
        R_{ij} = \frac{\Sigma_{ij}}{\sqrt{v_i v_j}}, \qquad
        v_i = \Sigma_{ii} + \epsilon \tfrac1d \operatorname{tr} \Sigma, \qquad C = R^{1/2}

    The root is that of iSQRT-COV (P. Li, J. Xie, Q. Wang, Z. Gao, CVPR 2018), by Newton-Schulz iteration on
    the channels' side. All channels count equally, however strong they are, so the vector does not depend on
    the scale of a channel. ε keeps a channel that is almost constant from being raised to full strength: its
    rounding errors would count as signal.

    Cost: 6 products forward, 8 backward (12 and 16 with ``iteration="paper"``), in addition to the
    covariance. The division changes eigenvalues and eigenvectors; zero eigenvalues stay zero.
    """

    summary: ClassVar[str] = "square root of the correlation matrix by Newton-Schulz iteration"
    Options: ClassVar[type[CorrelationOptions]] = CorrelationOptions
    options: CorrelationOptions

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with optional weights ``(B, n)``."""
        r_BCC = correlation(x, weights, self.options.eps)
        return triu_vec(matrix_sqrt(r_BCC, iteration=self.options.iteration, steps=self.options.steps))


def correlation(x: Tensor, weights: Tensor | None, eps: float) -> Tensor:
    """Return the correlation matrix of x ``(B, C, n)``, ``(B, C, C)``; zero for constant channels."""
    check_features(x)
    if weights is not None:
        check_weights(weights, x)
    with autocast_off(x):
        # In units of the largest spread, which the division removes.
        m_BCn, _ = center(*as_batch(x, weights))
        sigma_BCC = torch.bmm(m_BCn, m_BCn.mT)
        variance_BC = sigma_BCC.diagonal(dim1=-2, dim2=-1)
        variance_BC = variance_BC + eps * variance_BC.mean(-1, keepdim=True)
        over_BC = reciprocal_or_zero(root_or_zero(variance_BC))
        return sigma_BCC * over_BC.unsqueeze(-1) * over_BC.unsqueeze(-2)
