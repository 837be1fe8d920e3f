"""Functions of the eigenvalues: matrix power (MPN-COV), logarithm (DeepO2P) and Pow-TMLR."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from covpool.arguments import check_choice, check_positive
from covpool.functional.covariance import covariance, triu_vec
from covpool.functional.eigen import (
    Power,
    ScalarFunction,
    function_of_matrix,
    matrix_log,
    matrix_power,
    spectrum,
)
from covpool.functional.numerics import autocast_off, largest_entry, reciprocal_or_zero
from covpool.nn.pooling.method import Method


@dataclass(frozen=True)
class DeepO2POptions:
    """The shift that keeps the logarithm finite.

    Attributes:
        eps: ε, added to every eigenvalue, in the unit of the squared features.
    """

    eps: float = 1e-3

    def __post_init__(self) -> None:
        check_positive("eps", self.eps)


class DeepO2P(Method):
    r"""The logarithm of the covariance, :math:`\log(\Sigma + \epsilon I)`, as d(d+1)/2 values.

    C. Ionescu, O. Vantzos, C. Sminchisescu, "Matrix Backpropagation for Deep Networks with Structured
    Layers", ICCV 2015. The paper uses the second moment; this class uses the covariance, like the other
    methods. The logarithm flattens the manifold of covariances under the log-Euclidean metric. Cost in
    addition to the covariance: one eigendecomposition of d×d and one product forward, four products backward.
    Zero eigenvalues become log ε, the largest in magnitude, and outweigh the signal. The roots of later
    methods avoid this.
    """

    summary: ClassVar[str] = "matrix logarithm of the covariance plus εI (DeepO2P)"
    Options: ClassVar[type[DeepO2POptions]] = DeepO2POptions
    options: DeepO2POptions

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with optional weights ``(B, n)``."""
        return triu_vec(matrix_log(covariance(x, weights=weights), eps=self.options.eps))


PostNormalization = Literal["none", "spectral", "frobenius"]
POST_NORMALIZATIONS = ("none", "spectral", "frobenius")


@dataclass(frozen=True)
class MpnCovOptions:
    """The normalization of the eigenvalues.

    Attributes:
        power: α, the exponent; ½ is the paper's best.
        post_normalization: ``"spectral"`` divides the result by its largest eigenvalue, ``"frobenius"`` by
            its Frobenius norm; ``"none"`` is the paper's best.
    """

    power: float = 0.5
    post_normalization: PostNormalization = "none"

    def __post_init__(self) -> None:
        check_positive("power", self.power)
        check_choice("post_normalization", self.post_normalization, POST_NORMALIZATIONS)


class MpnCov(Method):
    r"""A power of the covariance, :math:`\Sigma^\alpha = U \Lambda^\alpha U^T`, as d(d+1)/2 values.

    P. Li, J. Xie, Q. Wang, W. Zuo, "Is Second-order Information Helpful for Large-scale Visual
    Recognition?", ICCV 2017. See :mod:`covpool.functional.eigen` for the gradient, which is finite where
    eigenvalues repeat or vanish. Cost in addition to the covariance: one eigendecomposition of d×d and one
    product forward, four products backward; a second decomposition for ``post_normalization="spectral"``.
    Zero eigenvalues stay zero.
    """

    summary: ClassVar[str] = "a power of the covariance, ½ by default, by eigendecomposition (MPN-COV)"
    Options: ClassVar[type[MpnCovOptions]] = MpnCovOptions
    options: MpnCovOptions

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with optional weights ``(B, n)``."""
        c_BCC = matrix_power(covariance(x, weights=weights), self.options.power)
        return triu_vec(post_normalized(c_BCC, self.options.post_normalization))


def post_normalized(c_BCC: Tensor, normalization: PostNormalization) -> Tensor:
    """Return ``c`` divided by its norm; zero for zero."""
    if normalization == "none":
        return c_BCC
    with autocast_off(c_BCC):
        return _divided_by_norm(c_BCC, normalization)


def _divided_by_norm(c_BCC: Tensor, normalization: PostNormalization) -> Tensor:
    c_BCC = c_BCC * reciprocal_or_zero(largest_entry(c_BCC))  # no square of an entry may overflow
    if normalization == "frobenius":
        norm = torch.linalg.matrix_norm(c_BCC, keepdim=True)
    else:
        # The derivative of an eigenvalue is that of uᵀCu with a constant eigenvector u.
        u_BC1 = spectrum(c_BCC.detach()).vectors[..., -1:]
        norm = torch.bmm(torch.bmm(u_BC1.mT, c_BCC), u_BC1)
    return c_BCC * reciprocal_or_zero(norm)


@dataclass(frozen=True)
class PowerTmlrOptions:
    """The metric.

    Attributes:
        power: θ of the power-Euclidean metric; ½ gives the square root, θ → 0 the logarithm.
    """

    power: float = 0.5

    def __post_init__(self) -> None:
        check_positive("power", self.power)


class PowerTmlr(Method):
    r"""The logarithmic map at I of the power-Euclidean metric, :math:`\tfrac1\theta(\Sigma^\theta - I)`.

    Z. Chen, Y. Song, X. Wu, G. Liu, N. Sebe, "Understanding Matrix Function Normalizations in Covariance
    Pooling through the Lens of Riemannian Geometry", ICLR 2025. A linear classifier on the result works in
    the tangent space at the identity. The result differs from :class:`MpnCov` by a scale and an offset, which
    a classifier with a bias can undo; the starting point and the speed of training differ. It has d(d+1)/2
    values. Cost: as MPN-COV. Zero eigenvalues become −1/θ.
    """

    summary: ClassVar[str] = "tangent vector (Σ^θ − I)/θ of the power-Euclidean metric (Pow-TMLR)"
    Options: ClassVar[type[PowerTmlrOptions]] = PowerTmlrOptions
    options: PowerTmlrOptions

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with optional weights ``(B, n)``."""
        tangent = TangentOfPower(self.options.power)
        return triu_vec(function_of_matrix(covariance(x, weights=weights), tangent))


@dataclass(frozen=True)
class TangentOfPower(ScalarFunction):
    """``(λ^θ − 1)/θ``, without cancellation for a small θ."""

    power: float

    def value(self, eigenvalues: Tensor) -> Tensor:
        """Return the value of each eigenvalue; −1/θ at zero."""
        return torch.expm1(self.power * eigenvalues.log()) / self.power

    def divided_differences(self, eigenvalues: Tensor) -> Tensor:
        """Return the divided differences of the power, divided by θ."""
        return Power(self.power).divided_differences(eigenvalues) / self.power
