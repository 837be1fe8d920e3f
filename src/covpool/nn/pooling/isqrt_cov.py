"""The matrix square root by iteration: iSQRT-COV and Polar Express."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from covpool.arguments import check_choice
from covpool.functional import polar_express
from covpool.functional.covariance import covariance, triu_vec
from covpool.functional.isqrt_cov import COMPUTE_DTYPES, SIDES, Side, isqrt_cov
from covpool.functional.matrix_sqrt import BACKWARDS, Backward
from covpool.functional.newton_schulz import Coefficients, Iteration, check_steps, step_coefficients
from covpool.functional.numerics import COMPENSATIONS, NORMALIZATIONS, Normalization
from covpool.nn.pooling.method import Method


@dataclass(frozen=True)
class IsqrtCovOptions:
    """The options of :func:`covpool.functional.isqrt_cov`, with one more compensation.

    Attributes:
        iteration: ``"fitted"``, with almost the result of the paper's 5 steps, or ``"paper"``.
        steps: K, the number of steps: 3 or 4 of the fitted iteration, 3 by default; any number of the
            paper's, 5 by default, at most 15 for float32 features and 40 for float64. ``None`` becomes the
            default.
        compensation: ``"matched"`` (the paper's), ``"none"``, or ``"batchnorm"``: a BatchNorm on the vector
            in place of the compensation, as in the paper's Table 4.
    """

    iteration: Iteration = "fitted"
    steps: int | None = None
    normalization: Normalization = "trace"
    compensation: Literal["matched", "none", "batchnorm"] = "matched"
    side: Side = "auto"
    backward: Backward = "saved"
    compute_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_choice("compute_dtype", self.compute_dtype, COMPUTE_DTYPES)
        object.__setattr__(self, "steps", len(self.coefficients))
        check_choice("normalization", self.normalization, NORMALIZATIONS)
        check_choice("compensation", self.compensation, (*COMPENSATIONS, "batchnorm"))
        check_choice("side", self.side, SIDES)
        check_choice("backward", self.backward, BACKWARDS)

    @property
    def coefficients(self) -> Coefficients:
        """``(a, b)`` of every step."""
        return step_coefficients(self.iteration, self.steps, self.compute_dtype or torch.float64)


class IsqrtCov(Method):
    """The square root of the covariance by Newton-Schulz iteration, as a vector of d(d+1)/2 values.

    P. Li, J. Xie, Q. Wang, Z. Gao, "Towards Faster Training of Global Covariance Pooling Networks by
    Iterative Matrix Square Root Normalization", CVPR 2018. See :func:`covpool.functional.isqrt_cov` for the
    equations. Cost in addition to the covariance, in products of matrices of the smaller side: 12 forward and
    16 backward at the paper's 5 steps, 9 and 12 at 4, 6 and 8 at 3. Zero eigenvalues stay zero.
    """

    summary: ClassVar[str] = "matrix square root of the covariance by Newton-Schulz iteration (iSQRT-COV)"
    Options: ClassVar[type[IsqrtCovOptions]] = IsqrtCovOptions
    options: IsqrtCovOptions

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__(channels, **options)
        batchnorm = self.options.compensation == "batchnorm"
        self.norm = nn.BatchNorm1d(self.out_features) if batchnorm else None

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with optional weights ``(B, n)``."""
        options = self.options
        v = isqrt_cov(
            x,
            iteration=options.iteration,
            steps=options.steps,
            normalization=options.normalization,
            compensation="matched" if options.compensation == "matched" else "none",
            weights=weights,
            side=options.side,
            backward=options.backward,
            compute_dtype=options.compute_dtype,
            vector=True,
        )
        if self.norm is None:
            return v
        # In a layer cast to half precision, BatchNorm needs its own dtype.
        normalized: Tensor = self.norm(v.to(self.norm.weight.dtype))
        return normalized.to(v.dtype)

    def reset_parameters(self) -> None:
        """Reset BatchNorm, if there is one."""
        if self.norm is not None:
            self.norm.reset_parameters()


@dataclass(frozen=True)
class PolarExpressOptions:
    """The number of polynomials, and the eigenvalues they are made for.

    Attributes:
        steps: K, the number of polynomials.
        lower: the square root of the smallest eigenvalue, over the Frobenius norm, that they are made for.
    """

    steps: int = polar_express.STEPS
    lower: float = polar_express.LOWER

    def __post_init__(self) -> None:
        check_steps(self.steps, most=polar_express.MOST_STEPS)
        polar_express.check_lower(self.lower)


class PolarExpress(Method):
    r"""The root of the covariance by a composition of optimal polynomials, as d(d+1)/2 values.

    N. Amsel, D. Persson, C. Musco, R. Gower, "The Polar Express: Optimal Matrix Sign Methods and Their
    Application to the Muon Algorithm", 2025, applied to the square root in coupled form. See
    :mod:`covpool.functional.polar_express` for the equations. Cost: ``4K - 3`` products forward (17 at 5
    steps), twice that backward, in addition to the covariance. Zero eigenvalues stay zero; those below the
    bound become too small.
    """

    summary: ClassVar[str] = "square root of the covariance by optimal polynomials (Polar Express, coupled)"
    Options: ClassVar[type[PolarExpressOptions]] = PolarExpressOptions
    options: PolarExpressOptions

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__(channels, **options)
        self.polynomials = polar_express.optimal_polynomials(self.options.lower, self.options.steps)

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with optional weights ``(B, n)``."""
        return triu_vec(polar_express.root_by_polynomials(covariance(x, weights=weights), self.polynomials))
