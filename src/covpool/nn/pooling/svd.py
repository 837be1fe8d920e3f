"""The matrix square root by SVD, with Taylor or Padé gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from covpool.arguments import check_positive, check_whole
from covpool.functional.covariance import covariance, triu_vec
from covpool.functional.eigen import ScalarFunction, function_of_matrix, reciprocal_of_sums
from covpool.nn.pooling.method import Method


@dataclass(frozen=True)
class SvdTaylorOptions:
    """The length of the series.

    Attributes:
        degree: K, the degree of the polynomial.
    """

    degree: int = 100

    def __post_init__(self) -> None:
        check_whole("degree", self.degree)


class SvdTaylor(Method):
    r"""The exact root of the covariance, with a gradient that stays small for close eigenvalues.

    Y. Song, N. Sebe, W. Wang, "Why Approximate Matrix Square Root Outperforms Accurate SVD in Global
    Covariance Pooling?", ICCV 2021. The gradient of a decomposition divides by differences of eigenvalues.
    This method uses

    .. math::
        \frac{1}{\lambda_i - \lambda_j} \approx
            \frac{1}{\lambda_i} \sum_{k=0}^{K} \Big(\frac{\lambda_j}{\lambda_i}\Big)^k, \qquad
        \lambda_i > \lambda_j,

    In the gradient of the root (:mod:`covpool.functional.eigen`) this multiplies each :math:`K_{ij}` by
    :math:`1 - (\lambda_j/\lambda_i)^{K+1}`: about 1 for distant eigenvalues, 0 for equal ones. So the
    gradient is approximate. The exact gradient is finite, too: see
    :class:`~covpool.nn.pooling.spectral.MpnCov`. The result has d(d+1)/2 values. Cost: as MPN-COV. Zero
    eigenvalues stay zero.
    """

    summary: ClassVar[str] = "exact square root, gradient of the SVD by a Taylor polynomial (SVD-Taylor)"
    Options: ClassVar[type[SvdTaylorOptions]] = SvdTaylorOptions
    options: SvdTaylorOptions

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with optional weights ``(B, n)``."""
        root = RootWithTaylorGradient(self.options.degree)
        return triu_vec(function_of_matrix(covariance(x, weights=weights), root))


@dataclass(frozen=True)
class RootWithTaylorGradient(ScalarFunction):
    """``√λ``, with divided differences by a truncated series."""

    degree: int

    def value(self, eigenvalues: Tensor) -> Tensor:
        """Return the root."""
        return eigenvalues.sqrt()

    def divided_differences(self, eigenvalues: Tensor) -> Tensor:
        """Return those of the root, each times the summed part of the geometric series."""
        exact = reciprocal_of_sums(eigenvalues.sqrt())
        approximate = exact * (1.0 - ratios(eigenvalues).pow(self.degree + 1))
        return with_diagonal_of(exact, approximate)


def ratios(eigenvalues: Tensor) -> Tensor:
    """Return the smaller of each pair divided by the larger; zero where both are zero."""
    rows, columns = eigenvalues.unsqueeze(-1), eigenvalues.unsqueeze(-2)
    larger = torch.maximum(rows, columns)
    return torch.minimum(rows, columns) / torch.where(larger == 0, 1.0, larger)


def with_diagonal_of(diagonal: Tensor, rest: Tensor) -> Tensor:
    """Return ``rest`` with another diagonal: the gradient of the eigenvalues needs no approximation."""
    identity = torch.eye(rest.shape[-1], dtype=torch.bool, device=rest.device)
    return torch.where(identity, diagonal, rest)


@dataclass(frozen=True)
class SvdPadeOptions:
    """The bound of the quotient.

    Attributes:
        limit: the largest value of 1/(1 − r), where r is the ratio of two eigenvalues.
    """

    limit: float = 1e4

    def __post_init__(self) -> None:
        check_positive("limit", self.limit)


class SvdPade(Method):
    r"""The exact root of the covariance, with a gradient whose quotients are bounded.

    Y. Song, N. Sebe, W. Wang, "Why Approximate Matrix Square Root Outperforms Accurate SVD in Global
    Covariance Pooling?", ICCV 2021. Like :class:`SvdTaylor`, with the Padé approximant of the geometric
    series in place of its partial sum. That approximant is :math:`1/(1 - r)` itself, for every order with a
    denominator. The authors solve a singular system for order 50: its rounding keeps the quotient from its
    pole at r = 1. This class bounds the quotient instead:

    .. math::
        \frac{1}{\lambda_i - \lambda_j} \approx
            \frac{1}{\lambda_i} \min\Big(\frac{1}{1 - r}, \text{limit}\Big), \qquad
        r = \frac{\lambda_j}{\lambda_i} < 1 .

    The gradient is exact where eigenvalues differ by more than one part in ``limit``, and too small where
    they are closer; equal pairs do not contribute. So the gradient is approximate. The result has d(d+1)/2
    values. Cost: as MPN-COV. Zero eigenvalues stay zero.
    """

    summary: ClassVar[str] = "exact square root, gradient of the SVD by bounded quotients (SVD-Padé)"
    Options: ClassVar[type[SvdPadeOptions]] = SvdPadeOptions
    options: SvdPadeOptions

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with optional weights ``(B, n)``."""
        root = RootWithBoundedGradient(self.options.limit)
        return triu_vec(function_of_matrix(covariance(x, weights=weights), root))


@dataclass(frozen=True)
class RootWithBoundedGradient(ScalarFunction):
    """``√λ``, with divided differences by a bounded quotient."""

    limit: float

    def value(self, eigenvalues: Tensor) -> Tensor:
        """Return the root."""
        return eigenvalues.sqrt()

    def divided_differences(self, eigenvalues: Tensor) -> Tensor:
        """Return those of the root, each times the kept part of 1/(1 − r)."""
        exact = reciprocal_of_sums(eigenvalues.sqrt())
        kept = ((1.0 - ratios(eigenvalues)) * self.limit).clamp(max=1.0)
        return with_diagonal_of(exact, exact * kept)
