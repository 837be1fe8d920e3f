"""Which methods act on eigenvalues, and what comes out of their layers along the eigenvectors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from covpool.functional import covariance, triu_unvec
from covpool.nn import CovPool

STEPS = (1, 3, 5, 7, 9)


@dataclass(frozen=True)
class Curve:
    """A method that acts on eigenvalues.

    Attributes:
        method: its name.
        options: of the layer.
        degree: the power of the trace that its values are to be divided by to compare them with others';
            ``None`` for those that are no power of the features' scale.
    """

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    degree: float | None = 0.5

    @property
    def label(self) -> str:
        """``isqrt_cov steps=5``."""
        return " ".join([self.method, *(f"{name}={value}" for name, value in self.options.items())])


CURVES = (
    Curve("cov", degree=1.0),
    *(Curve("isqrt_cov", {"steps": steps}) for steps in STEPS),
    Curve("mpn_cov"),
    Curve("mpa_lya"),
    Curve("mtp_lya"),
    Curve("polar_express"),
    Curve("deep_o2p", degree=None),
    Curve("power_tmlr", degree=None),
)
# Their matrix is that of mpn_cov, for two of them where the mean of the features is zero.
EXACT_ROOTS = ("svd_pade", "svd_taylor", "improved_bcnn", "g2denet")
NOT_OF_EIGENVALUES = {
    "gap": "the mean, no matrix",
    "bcnn": "a root of entries, which changes the eigenvectors",
    "cbp": "a random sketch, no matrix",
    "cholesky": "a triangular factor, which depends on the order of the channels",
    "dropcov": "weighs and leaves out channels, which changes the eigenvectors",
    "moment_probing": "learned products, no matrix of the channels",
}


def values_out(curve: Curve, x: Tensor, vectors: Tensor) -> Tensor:
    """``uᵀCu`` of the layer's matrix C for every column u of ``vectors``; x is ``(1, C, n)``."""
    return along(_matrix(curve.method, x, curve.options), vectors)


def exact_root(method: str, x: Tensor, vectors: Tensor) -> Tensor:
    """The same of one of ``EXACT_ROOTS``, with what it does beside the root undone."""
    c = _matrix(method, x, {})
    if method == "improved_bcnn":  # the signed root of the entries, and unit length; ‖Σ^½‖ is √tr Σ
        c = c * c.abs()
        c = c * (covariance(x)[0].trace().sqrt() / torch.linalg.matrix_norm(c))
    if method == "g2denet":  # the last row and column hold the mean, and 1
        c = c[:-1, :-1]
    return along(c, vectors)


def along(matrix: Tensor, vectors: Tensor) -> Tensor:
    """``uᵀCu`` of each column u."""
    return (vectors * (matrix @ vectors)).sum(0)


def _matrix(method: str, x: Tensor, options: dict[str, Any]) -> Tensor:
    layer = CovPool(x.shape[1], method, dim=None, layout="channels_first", **options)
    return triu_unvec(layer(x)[0])
