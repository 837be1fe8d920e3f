"""Plain covariance pooling (the paper's Plain-COV)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from covpool.functional.covariance import covariance
from covpool.functional.triu import triu_vec
from covpool.nn.pooling.method import Method


class Cov(Method):
    r"""The covariance itself, :math:`\Sigma = X \bar I X^T`, as a vector of d(d+1)/2 numbers.

    What the normalisations of the other methods are measured against. See
    :func:`covpool.functional.covariance`. Cost: one product of d×n by n×d forward, two backward. Zero
    eigenvalues stay zero, and large ones stay as large as they are.
    """

    summary: ClassVar[str] = "the covariance without normalisation (Plain-COV)"

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with weights ``(B, n)`` or none."""
        return triu_vec(covariance(x, weights=weights))
