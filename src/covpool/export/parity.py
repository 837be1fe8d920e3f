"""How far the logits of an exported file are from those of torch, on the same images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from covpool.export.running import Array


@dataclass(frozen=True)
class Parity:
    """Two sets of logits beside each other.

    Attributes:
        images: how many were compared.
        agreeing: of how many both have the same class first.
        absolute: the largest difference of a logit; infinite where one is not a number.
        relative: the same, as a part of torch's largest logit.
    """

    images: int
    agreeing: int
    absolute: float
    relative: float

    @property
    def top1(self) -> float:
        """The part of the images on which the first class is the same."""
        return self.agreeing / self.images


def compare(reference_BK: Array, found_BK: Array) -> Parity:
    """Compare a file's logits with torch's, which are finite."""
    if found_BK.shape != reference_BK.shape:
        raise ValueError(f"logits have shape {found_BK.shape}, and torch's {reference_BK.shape}")
    # In float64: the difference itself should not be rounded.
    found, reference = found_BK.astype(np.float64), reference_BK.astype(np.float64)
    finite = bool(np.isfinite(found).all())
    absolute = float(np.abs(found - reference).max()) if finite else float("inf")
    is_number = ~np.isnan(found).any(axis=1)
    agreeing = is_number & (np.nan_to_num(found).argmax(axis=1) == reference.argmax(axis=1))
    largest = float(np.abs(reference).max())
    relative = absolute / largest if largest else (0.0 if absolute == 0 else float("inf"))
    return Parity(len(reference), int(agreeing.sum()), absolute, relative)
