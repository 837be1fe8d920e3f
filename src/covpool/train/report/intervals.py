"""How sure a share of right answers is, and the difference of two on the same images."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.stats import binomtest

# Of a normal distribution, 95 % lies within so many standard deviations.
Z = 1.959963984540054


def wilson(right: int, images: int) -> tuple[float, float]:
    """A 95 % interval of a share (Wilson 1927), which is good for few images and near 0 and 1 as well.

    Example:
        >>> low, high = wilson(8, 10)
        >>> f"{low:.3f} {high:.3f}"
        '0.490 0.943'
    """
    middle = (right + Z * Z / 2) / (images + Z * Z)
    half = Z / (images + Z * Z) * math.sqrt(right * (images - right) / images + Z * Z / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class PairedDifference:
    """Two models on the same images.

    Attributes:
        images: how many there are.
        first_only: those that the first gets right and the second does not.
        second_only: those that the second gets right and the first does not.
    """

    images: int
    first_only: int
    second_only: int

    @property
    def difference(self) -> float:
        """The first's share of right answers less the second's."""
        return (self.first_only - self.second_only) / self.images

    @property
    def interval(self) -> tuple[float, float]:
        """A 95 % interval of the difference.

        It is Wald's, with half an image more in each of the four fields of the table (Agresti and Min 2005):
        it keeps what it promises for few images too, and is never empty, as that of a bootstrap is where the
        models agree on all images.
        """
        images = self.images + 2
        first, second = self.first_only + 0.5, self.second_only + 0.5
        middle = (first - second) / images
        half = Z * math.sqrt(first + second - (first - second) ** 2 / images) / images
        return max(-1.0, middle - half), min(1.0, middle + half)

    @property
    def p_value(self) -> float:
        """How often a difference as large comes by chance alone: McNemar's test, exact (a sign test)."""
        differing = self.first_only + self.second_only
        return float(binomtest(self.first_only, differing).pvalue) if differing else 1.0

    @property
    def is_clear(self) -> bool:
        """Whether chance is an unlikely explanation, by the test and by the interval."""
        low, high = self.interval
        return self.p_value < 0.05 and not low <= 0 <= high
