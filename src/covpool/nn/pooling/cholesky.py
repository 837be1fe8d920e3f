"""Cho-TMLR: the Cholesky factor of the covariance, its diagonal in logarithms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from covpool.arguments import check_positive
from covpool.functional.covariance import as_batch, center, triu_vec, without_outliers
from covpool.functional.numerics import autocast_off, check_features, check_weights
from covpool.nn.pooling.method import Method


@dataclass(frozen=True)
class CholeskyOptions:
    """What keeps the factor from being singular.

    Attributes:
        eps: ε, added to every eigenvalue, in the unit of the squared features.
    """

    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_positive("eps", self.eps)


class Cholesky(Method):
    r"""The logarithmic map at I of the log-Cholesky metric, as a vector of d(d+1)/2 numbers.

    .. math::
        \Sigma + \epsilon I = L L^T, \qquad
        T = \lfloor L \rfloor + \lfloor L \rfloor^T + 2 \log \operatorname{diag} L

    with :math:`\lfloor L \rfloor` the part below the diagonal. Z. Chen, Y. Song, X. Wu, G. Liu, N. Sebe,
    "Understanding Matrix Function Normalizations in Covariance Pooling through the Lens of Riemannian
    Geometry", ICLR 2025 (Cho-TMLR). See :func:`cholesky_factor` for how L is computed. Cost: one orthogonal
    triangularization of (n+d)×d. It is not a function of eigenvalues, and depends on the order of the
    channels; of a singular Σ the diagonal of L reaches down to √ε, in T to log ε.
    """

    summary: ClassVar[str] = "Cholesky factor with the logarithm of its diagonal (Cho-TMLR)"
    Options: ClassVar[type[CholeskyOptions]] = CholeskyOptions
    options: CholeskyOptions

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with optional weights ``(B, n)``."""
        l_BCC = cholesky_factor(x, weights, self.options.eps)
        with autocast_off(l_BCC):
            logarithms = 2.0 * l_BCC.diagonal(dim1=-2, dim2=-1).log()
            return triu_vec(l_BCC.tril(-1).mT + torch.diag_embed(logarithms))


def cholesky_factor(x: Tensor, weights: Tensor | None, eps: float) -> Tensor:
    r"""Return L of :math:`\Sigma + \epsilon I`, ``(B, C, C)``, without forming Σ.

    With fewer positions than channels, Σ in float32 has negative pivots, and its factorization fails. The
    factor of :math:`[M, \sqrt\epsilon I]`, with :math:`\Sigma = M M^T`, has none: it is made triangular by
    reflections, :math:`[M, \sqrt\epsilon I]^T = Q L^T`. The price: the derivative with respect to a weight
    that is exactly zero, which goes through the root of the weight, is not to be relied on.
    """
    check_features(x)
    if weights is not None:
        check_weights(weights, x)
    with autocast_off(x):
        x_BCn, weights_Bn = as_batch(x, weights)
        if weights_Bn is not None:  # the logarithm of a small pivot would show even the trace of an outlier
            x_BCn = without_outliers(x_BCn, weights_Bn)
        m_BCn, s = center(x_BCn, weights_Bn)
        ridge_CC = torch.eye(m_BCn.shape[1], dtype=m_BCn.dtype, device=m_BCn.device) * eps**0.5
        tall = torch.cat([(m_BCn * s).mT, ridge_CC.expand(m_BCn.shape[0], -1, -1)], dim=1)
        _, upper = torch.linalg.qr(tall)
        # The sign of each row is arbitrary; the Cholesky factor is the one with a positive diagonal.
        signs = torch.where(upper.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
        factor: Tensor = (upper * signs.unsqueeze(-1)).mT
        return factor
