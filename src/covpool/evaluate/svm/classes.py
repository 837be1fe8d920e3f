"""Classes that SVMs can be made of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from covpool.data.counts import counted


def check_every_class(labels: NDArray[np.integer], classes: Sequence[str]) -> None:
    """Raise unless every class has an image that can be used, by the labels of those that can.

    Example:
        >>> check_every_class(np.array([0, 0, 2]), ["auk", "bee", "cat"])
        Traceback (most recent call last):
        ValueError: 1 class has no training image that can be used, first 'bee': there is no SVM of it
    """
    lacking = np.flatnonzero(np.bincount(labels, minlength=len(classes)) == 0)
    if len(lacking):
        has = "has" if len(lacking) == 1 else "have"
        raise ValueError(
            f"{counted(len(lacking), 'class')} {has} no training image that can be used, first "
            f"{classes[lacking[0]]!r}: there is no SVM of it"
        )
