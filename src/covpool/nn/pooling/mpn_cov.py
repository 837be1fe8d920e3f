"""MPN-COV: a power of the covariance by eigendecomposition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from covpool.functional.arguments import check_choice, check_positive
from covpool.functional.covariance import covariance
from covpool.functional.eigen import matrix_power, spectrum
from covpool.functional.normalization import largest_entry, reciprocal_or_zero
from covpool.functional.precision import autocast_off
from covpool.functional.triu import triu_vec
from covpool.nn.pooling.method import Method

PostNormalization = Literal["none", "spectral", "frobenius"]
POST_NORMALIZATIONS = ("none", "spectral", "frobenius")


@dataclass(frozen=True)
class MpnCovOptions:
    """How the eigenvalues are normalised.

    Attributes:
        power: α, their exponent; ½ is the paper's best.
        post_normalization: ``"spectral"`` divides the result by its largest eigenvalue, ``"frobenius"`` by
            its Frobenius norm; ``"none"``, the paper's best, leaves it.
    """

    power: float = 0.5
    post_normalization: PostNormalization = "none"

    def __post_init__(self) -> None:
        check_positive("power", self.power)
        check_choice("post_normalization", self.post_normalization, POST_NORMALIZATIONS)


class MpnCov(Method):
    r"""A power of the covariance, :math:`\Sigma^\alpha = U \Lambda^\alpha U^T`, as d(d+1)/2 numbers.

    P. Li, J. Xie, Q. Wang, W. Zuo, "Is Second-order Information Helpful for Large-scale Visual
    Recognition?", ICCV 2017. See :mod:`covpool.functional.eigen` for the gradient, which is finite where
    eigenvalues repeat or vanish. Cost: one eigendecomposition of d×d and one product forward, four products
    backward, beside the covariance; a second decomposition for ``post_normalization="spectral"``. Zero
    eigenvalues stay zero.
    """

    summary: ClassVar[str] = "a power of the covariance, ½ by default, by eigendecomposition (MPN-COV)"
    Options: ClassVar[type[MpnCovOptions]] = MpnCovOptions
    options: MpnCovOptions

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with weights ``(B, n)`` or none."""
        c_BCC = matrix_power(covariance(x, weights=weights), self.options.power)
        return triu_vec(post_normalized(c_BCC, self.options.post_normalization))


def post_normalized(c_BCC: Tensor, normalization: PostNormalization) -> Tensor:
    """``c`` divided by a norm of its own; zero for zero."""
    if normalization == "none":
        return c_BCC
    with autocast_off(c_BCC):
        return _divided_by_norm(c_BCC, normalization)


def _divided_by_norm(c_BCC: Tensor, normalization: PostNormalization) -> Tensor:
    c_BCC = c_BCC * reciprocal_or_zero(largest_entry(c_BCC))  # no square of an entry may overflow
    if normalization == "frobenius":
        norm = torch.linalg.matrix_norm(c_BCC, keepdim=True)
    else:
        # The derivative of an eigenvalue is that of uᵀCu with its eigenvector u held still.
        u_BC1 = spectrum(c_BCC.detach()).vectors[..., -1:]
        norm = torch.bmm(torch.bmm(u_BC1.mT, c_BCC), u_BC1)
    return c_BCC * reciprocal_or_zero(norm)
