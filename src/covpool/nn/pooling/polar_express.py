"""The root of the covariance by optimal polynomials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from covpool.functional.arguments import check_steps
from covpool.functional.covariance import covariance
from covpool.functional.polar_express import check_lower, optimal_polynomials, root_by_polynomials
from covpool.functional.triu import triu_vec
from covpool.nn.pooling.method import Method


@dataclass(frozen=True)
class PolarExpressOptions:
    """How many polynomials, and for which eigenvalues.

    Attributes:
        steps: K, the number of polynomials.
        lower: the square root of the smallest eigenvalue, over the Frobenius norm, that they are made for.
    """

    steps: int = 5
    lower: float = 1e-2

    def __post_init__(self) -> None:
        check_steps(self.steps)
        check_lower(self.lower)


class PolarExpress(Method):
    r"""The root of the covariance by a composition of optimal polynomials, as d(d+1)/2 numbers.

    N. Amsel, D. Persson, C. Musco, R. Gower, "The Polar Express: Optimal Matrix Sign Methods and Their
    Application to the Muon Algorithm", 2025, brought to the square root in coupled form. See
    :mod:`covpool.functional.polar_express` for the equations. Cost: ``4K - 3`` products forward (17 at 5
    steps), twice that backward, beside the covariance. Zero eigenvalues stay zero, and those below the bound
    come out too small.
    """

    summary: ClassVar[str] = "square root of the covariance by optimal polynomials (Polar Express, coupled)"
    Options: ClassVar[type[PolarExpressOptions]] = PolarExpressOptions
    options: PolarExpressOptions

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__(channels, **options)
        self.polynomials = optimal_polynomials(self.options.lower, self.options.steps)

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with weights ``(B, n)`` or none."""
        return triu_vec(root_by_polynomials(covariance(x, weights=weights), self.polynomials))
