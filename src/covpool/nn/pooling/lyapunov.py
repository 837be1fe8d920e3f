"""Taylor and Padé approximations of the root, with gradients by the Lyapunov equation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from covpool.arguments import check_whole
from covpool.errors import UsageError
from covpool.functional.covariance import covariance, triu_vec
from covpool.functional.matrix_root import RootOptions, matrix_root
from covpool.nn.pooling.method import Method


@dataclass(frozen=True)
class MtpLyaOptions:
    """The order of each approximation.

    Attributes:
        degree: degree of the Taylor polynomial.
        backward_steps: number of iterations for Lyapunov's equation.
    """

    degree: int = 11
    backward_steps: int = 8

    def __post_init__(self) -> None:
        check_whole("degree", self.degree)
        check_whole("backward_steps", self.backward_steps)


class MtpLya(Method):
    r"""The root of the covariance by one polynomial, as a vector of d(d+1)/2 values.

    Y. Song, N. Sebe, W. Wang, "Fast Differentiable Matrix Square Root", ICLR 2022. See
    :mod:`covpool.functional.matrix_root` for the equations. Two things differ from the paper: the polynomial
    is zero at zero, so that zero eigenvalues stay zero, and the gradient between range and null space is
    complete. Cost at degree 11 and 8 steps in addition to the covariance: 11 products forward, 42 backward.
    The gradient is approximate: the gradient of the exact root, evaluated at the approximate root by a few
    iterations.
    """

    summary: ClassVar[str] = "square root by a Taylor polynomial, gradient by iterated Lyapunov (MTP-Lya)"
    Options: ClassVar[type[MtpLyaOptions]] = MtpLyaOptions
    options: MtpLyaOptions

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with optional weights ``(B, n)``."""
        how = RootOptions("taylor", "lyapunov_iteration", self.options.degree, self.options.backward_steps)
        return triu_vec(matrix_root(covariance(x, weights=weights), how))


HIGHEST_DEGREE = 10


@dataclass(frozen=True)
class MpaLyaOptions:
    """The order of each approximation.

    Attributes:
        degree: degree of the two polynomials of the Padé approximant.
        backward_steps: number of iterations for Lyapunov's equation.
    """

    degree: int = 5
    backward_steps: int = 8

    def __post_init__(self) -> None:
        check_whole("degree", self.degree)
        if self.degree > HIGHEST_DEGREE:
            raise UsageError(
                f"degree must be at most {HIGHEST_DEGREE}, because float32 cannot represent the "
                f"coefficients beyond it; got {self.degree}"
            )
        check_whole("backward_steps", self.backward_steps)


class MpaLya(Method):
    r"""The root of the covariance by one quotient of polynomials, as a vector of d(d+1)/2 values.

    Y. Song, N. Sebe, W. Wang, "Fast Differentiable Matrix Square Root", ICLR 2022. See
    :mod:`covpool.functional.matrix_root` for the equations. Two things differ from the paper: the quotient is
    zero at zero, so that zero eigenvalues stay zero, and the gradient between range and null space is
    complete. Cost at degree 5 and 8 steps in addition to the covariance: 4 products, a Cholesky factorization
    and two triangular solves forward, 42 products backward. The gradient is approximate: the gradient of the
    exact root, evaluated at the approximate root by a few iterations.
    """

    summary: ClassVar[str] = "square root by a Padé approximant, gradient by iterated Lyapunov (MPA-Lya)"
    Options: ClassVar[type[MpaLyaOptions]] = MpaLyaOptions
    options: MpaLyaOptions

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with optional weights ``(B, n)``."""
        how = RootOptions("pade", "lyapunov_iteration", self.options.degree, self.options.backward_steps)
        return triu_vec(matrix_root(covariance(x, weights=weights), how))
