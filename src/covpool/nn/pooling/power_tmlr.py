"""Pow-TMLR: the power of the covariance as a vector of a tangent space."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from covpool.functional.arguments import check_positive
from covpool.functional.covariance import covariance
from covpool.functional.eigen import Power, ScalarFunction, function_of_matrix
from covpool.functional.triu import triu_vec
from covpool.nn.pooling.method import Method


@dataclass(frozen=True)
class PowerTmlrOptions:
    """Which metric.

    Attributes:
        power: θ of the power-Euclidean metric; ½ is that of the square root, and θ → 0 that of the logarithm.
    """

    power: float = 0.5

    def __post_init__(self) -> None:
        check_positive("power", self.power)


class PowerTmlr(Method):
    r"""The logarithmic map at I of the power-Euclidean metric, :math:`\tfrac1\theta(\Sigma^\theta - I)`.

    Z. Chen, Y. Song, X. Wu, G. Liu, N. Sebe, "Understanding Matrix Function Normalizations in Covariance
    Pooling through the Lens of Riemannian Geometry", ICLR 2025. A linear classifier after it is one in the
    tangent space at the identity. From :class:`~covpool.nn.pooling.mpn_cov.MpnCov` it differs by a scale and
    an offset, which a classifier with a bias can undo: what differs is where training starts and how fast it
    goes. As a vector of d(d+1)/2 numbers. Cost: as MPN-COV. Zero eigenvalues become −1/θ.
    """

    summary: ClassVar[str] = "tangent vector (Σ^θ − I)/θ of the power-Euclidean metric (Pow-TMLR)"
    Options: ClassVar[type[PowerTmlrOptions]] = PowerTmlrOptions
    options: PowerTmlrOptions

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with weights ``(B, n)`` or none."""
        tangent = TangentOfPower(self.options.power)
        return triu_vec(function_of_matrix(covariance(x, weights=weights), tangent))


@dataclass(frozen=True)
class TangentOfPower(ScalarFunction):
    """``(λ^θ − 1)/θ``, without the difference that would cost a small θ its digits."""

    power: float

    def value(self, eigenvalues: Tensor) -> Tensor:
        """Of each; −1/θ at zero."""
        return torch.expm1(self.power * eigenvalues.log()) / self.power

    def divided_differences(self, eigenvalues: Tensor) -> Tensor:
        """Those of the power."""
        return Power(self.power).divided_differences(eigenvalues) / self.power
