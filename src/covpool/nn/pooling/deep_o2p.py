"""DeepO2P: the logarithm of the covariance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from covpool.functional.arguments import check_positive
from covpool.functional.covariance import covariance
from covpool.functional.eigen import matrix_log
from covpool.functional.triu import triu_vec
from covpool.nn.pooling.method import Method


@dataclass(frozen=True)
class DeepO2POptions:
    """What keeps the logarithm finite.

    Attributes:
        eps: ε, added to every eigenvalue, in the unit of the squared features.
    """

    eps: float = 1e-3

    def __post_init__(self) -> None:
        check_positive("eps", self.eps)


class DeepO2P(Method):
    r"""The logarithm of the covariance, :math:`\log(\Sigma + \epsilon I)`, as d(d+1)/2 numbers.

    C. Ionescu, O. Vantzos, C. Sminchisescu, "Matrix Backpropagation for Deep Networks with Structured
    Layers", ICCV 2015, where it is of the second moment; here of the covariance, as the other methods are.
    It flattens the manifold of covariances under the log-Euclidean metric. Cost: one eigendecomposition of
    d×d and one product forward, four products backward, beside the covariance. Zero eigenvalues become log
    ε, of all the largest in magnitude: they outweigh the signal, which is what the root of the later methods
    avoids.
    """

    summary: ClassVar[str] = "matrix logarithm of the covariance plus εI (DeepO2P)"
    Options: ClassVar[type[DeepO2POptions]] = DeepO2POptions
    options: DeepO2POptions

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with weights ``(B, n)`` or none."""
        return triu_vec(matrix_log(covariance(x, weights=weights), eps=self.options.eps))
