"""G²DeNet: the square root of a Gaussian's embedding, mean and covariance in one matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from covpool.arguments import check_choice, check_positive
from covpool.functional.covariance import as_batch, mean, second_moment, triu_vec
from covpool.functional.eigen import matrix_power
from covpool.functional.matrix_sqrt import matrix_sqrt
from covpool.functional.newton_schulz import Iteration, step_coefficients
from covpool.functional.numerics import autocast_off, check_features, check_weights
from covpool.nn.pooling.method import Method

Root = Literal["svd", "newton_schulz"]
ROOTS = ("svd", "newton_schulz")


@dataclass(frozen=True)
class G2DeNetOptions:
    """How much the mean counts, and how the root is taken.

    Attributes:
        beta: β, by which the mean is multiplied.
        root: ``"svd"``, the exact root by eigendecomposition, or ``"newton_schulz"``, as iSQRT-COV does it.
        iteration: ``"fitted"`` or ``"paper"``, the Newton-Schulz iteration.
        steps: number of Newton-Schulz steps: 3 or 4 fitted ones, 3 by default; any number of the paper's, 5
            by default. ``None`` becomes the default.
    """

    beta: float = 1.0
    root: Root = "svd"
    iteration: Iteration = "fitted"
    steps: int | None = None

    def __post_init__(self) -> None:
        check_positive("beta", self.beta)
        check_choice("root", self.root, ROOTS)
        coefficients = step_coefficients(self.iteration, self.steps, torch.float64)
        object.__setattr__(self, "steps", len(coefficients))


class G2DeNet(Method):
    r"""The root of the embedded Gaussian of the features, as a vector of (d+1)(d+2)/2 numbers.

    .. math::
        \begin{pmatrix} \Sigma + \beta^2 \mu \mu^T & \beta \mu \\ \beta \mu^T & 1 \end{pmatrix}^{1/2}

    Q. Wang, P. Li, L. Zhang, "G²DeNet: Global Gaussian Distribution Embedding Network and Its Application to
    Visual Recognition", CVPR 2017. The only method here that uses both mean and covariance. Cost: as
    MPN-COV, or as iSQRT-COV on the channels' side, of a matrix larger by one. Zero eigenvalues stay zero.
    """

    summary: ClassVar[str] = "square root of mean and covariance embedded in one matrix (G²DeNet)"
    Options: ClassVar[type[G2DeNetOptions]] = G2DeNetOptions
    options: G2DeNetOptions

    @property
    def out_features(self) -> int:
        """The triangle of a matrix larger by one."""
        return (self.channels + 1) * (self.channels + 2) // 2

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with optional weights ``(B, n)``."""
        embedded = gaussian_embedding(x, weights, self.options.beta)
        if self.options.root == "svd":
            return triu_vec(matrix_power(embedded, 0.5))
        return triu_vec(matrix_sqrt(embedded, iteration=self.options.iteration, steps=self.options.steps))


def gaussian_embedding(x: Tensor, weights: Tensor | None, beta: float) -> Tensor:
    """The matrix before the root, ``(B, C+1, C+1)``.

    It is the second moment of the features moved by ``(β − 1) μ``, with a one below each: positive
    semi-definite by construction. Where every position is masked it is zero.
    """
    check_features(x)
    if weights is not None:
        check_weights(weights, x)
    with autocast_off(x):
        x_BCn, weights_Bn = as_batch(x, weights)
        moved_BCn = x_BCn + (beta - 1.0) * mean(x_BCn, weights_Bn).unsqueeze(-1)
        with_ones = torch.cat([moved_BCn, torch.ones_like(moved_BCn[:, :1])], dim=1)
        return second_moment(with_ones, weights=weights_Bn)
