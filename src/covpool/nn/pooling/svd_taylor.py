"""SVD-Taylor: the exact root with a gradient whose divisions by differences are Taylor polynomials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from covpool.functional.arguments import check_whole
from covpool.functional.covariance import covariance
from covpool.functional.eigen import ScalarFunction, function_of_matrix, reciprocal_of_sums
from covpool.functional.triu import triu_vec
from covpool.nn.pooling.method import Method


@dataclass(frozen=True)
class SvdTaylorOptions:
    """How far the series goes.

    Attributes:
        degree: K of the polynomial.
    """

    degree: int = 100

    def __post_init__(self) -> None:
        check_whole("degree", self.degree)


class SvdTaylor(Method):
    r"""The exact root of the covariance, with a gradient that stays small where eigenvalues come close.

    Y. Song, N. Sebe, W. Wang, "Why Approximate Matrix Square Root Outperforms Accurate SVD in Global
    Covariance Pooling?", ICCV 2021. The gradient of a decomposition divides by differences of eigenvalues;
    here

    .. math::
        \frac{1}{\lambda_i - \lambda_j} \approx
            \frac{1}{\lambda_i} \sum_{k=0}^{K} \Big(\frac{\lambda_j}{\lambda_i}\Big)^k, \qquad
        \lambda_i > \lambda_j,

    which in the gradient of the root (:mod:`covpool.functional.eigen`) multiplies each :math:`K_{ij}` by
    :math:`1 - (\lambda_j/\lambda_i)^{K+1}`: right for eigenvalues that are apart, and zero for two that are
    equal. By nature an approximation: the root itself has a finite gradient there, which
    :class:`~covpool.nn.pooling.mpn_cov.MpnCov` gives. As a vector of d(d+1)/2 numbers. Cost: as MPN-COV.
    Zero eigenvalues stay zero.
    """

    summary: ClassVar[str] = "exact square root, gradient of the SVD by a Taylor polynomial (SVD-Taylor)"
    Options: ClassVar[type[SvdTaylorOptions]] = SvdTaylorOptions
    options: SvdTaylorOptions

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with weights ``(B, n)`` or none."""
        root = RootWithTaylorGradient(self.options.degree)
        return triu_vec(function_of_matrix(covariance(x, weights=weights), root))


@dataclass(frozen=True)
class RootWithTaylorGradient(ScalarFunction):
    """``√λ``, with the divided differences of a truncated series."""

    degree: int

    def value(self, eigenvalues: Tensor) -> Tensor:
        """The root."""
        return eigenvalues.sqrt()

    def divided_differences(self, eigenvalues: Tensor) -> Tensor:
        """Those of the root, each times the part of the geometric series that is summed."""
        exact = reciprocal_of_sums(eigenvalues.sqrt())
        approximate = exact * (1.0 - ratios(eigenvalues).pow(self.degree + 1))
        return with_diagonal_of(exact, approximate)


def ratios(eigenvalues: Tensor) -> Tensor:
    """The smaller of each pair over the larger; zero where both are zero."""
    rows, columns = eigenvalues.unsqueeze(-1), eigenvalues.unsqueeze(-2)
    larger = torch.maximum(rows, columns)
    return torch.minimum(rows, columns) / torch.where(larger == 0, 1.0, larger)


def with_diagonal_of(diagonal: Tensor, rest: Tensor) -> Tensor:
    """The gradient of the eigenvalues themselves divides by no difference, and stays as it is."""
    identity = torch.eye(rest.shape[-1], dtype=torch.bool, device=rest.device)
    return torch.where(identity, diagonal, rest)
