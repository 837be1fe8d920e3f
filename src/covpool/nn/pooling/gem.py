"""GeM: the generalized mean of every channel, between average and max pooling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from covpool.arguments import check_positive
from covpool.errors import UsageError
from covpool.functional.covariance import mean, without_outliers
from covpool.functional.numerics import at_least_float32, reciprocal_or_zero
from covpool.nn.pooling.method import Method

# Limits of the exponent: below 1 the gradient is unbounded, and the power of a feature that is 1000 times as
# large as those that count must fit into float32.
LOWEST, HIGHEST = 1, 10


@dataclass(frozen=True)
class GemOptions:
    """The exponent.

    Attributes:
        p: where the learned exponent starts, from 1 (average) to 10 (close to the maximum).
    """

    p: float = 3.0

    def __post_init__(self) -> None:
        check_positive("p", self.p)
        if not LOWEST <= self.p <= HIGHEST:
            raise UsageError(f"p must be from {LOWEST} to {HIGHEST}; got {self.p}")


class Gem(Method):
    r"""Generalized mean pooling (GeM) with a learned exponent: d values.

    F. Radenović, G. Tolias, O. Chum, "Fine-tuning CNN Image Retrieval with No Human Annotation", TPAMI 2019:

    .. math::
        y_c = \Big(\tfrac1n \sum_p \max(x_{cp}, 0)^p\Big)^{1/p}

    with one exponent p for all channels, learned from 3 and limited to 1 to 10. p = 1 is the average of
    features after ReLU; a large p approaches the maximum. Negative features count as zero. The authors' code
    uses 1e-6 instead of zero; here zero has a finite gradient. If no feature that counts is positive, the
    root is infinitely steep in a weight of zero; that derivative is zero here.

    Cost: a power of every feature.
    """

    summary: ClassVar[str] = "generalized mean of every channel, with a learned exponent (GeM)"
    order: ClassVar[int] = 1
    Options: ClassVar[type[GemOptions]] = GemOptions
    options: GemOptions

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__(channels, **options)
        self.p = nn.Parameter(torch.tensor([float(self.options.p)]))  # FSDP refuses parameters without axes

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with optional weights ``(B, n)``."""
        x_BCn = at_least_float32(x)
        counted_BCn = x_BCn
        if weights is not None:
            x_BCn = without_outliers(x_BCn, weights)
            counted_BCn = x_BCn.masked_fill((weights == 0).unsqueeze(1), 0.0)
        # In units of a channel's largest feature no power overflows. The unit cancels, also in the gradient.
        unit_BC1 = counted_BCn.detach().amax(-1, keepdim=True)
        unit_BC1 = unit_BC1.masked_fill(unit_BC1 < torch.finfo(x_BCn.dtype).tiny, 0.0)
        p = self.p.to(x_BCn.dtype)
        p = p + (p.clamp(LOWEST, HIGHEST) - p).detach()  # outside the range it has a gradient, and may return
        powers_BCn = power_or_zero(x_BCn * reciprocal_or_zero(unit_BC1), p)
        return power_or_zero(mean(powers_BCn, weights), 1 / p) * unit_BC1.squeeze(-1)

    def reset_parameters(self) -> None:
        """Reset the exponent."""
        nn.init.constant_(self.p, float(self.options.p))


def power_or_zero(x: Tensor, exponent: Tensor | float) -> Tensor:
    """Return ``x`` to a positive exponent; 0, with a derivative of 0, where x is not positive."""
    if not isinstance(exponent, Tensor) and exponent == 2:  # SimPool's default; needs no logarithm
        return x.clamp(min=0).square()
    # On a CPU, pow and masked_fill each take twice as long.
    positive = (x > 0).to(x.dtype)
    return ((x.clamp(min=0) + (1 - positive)).log() * exponent).exp() * positive
