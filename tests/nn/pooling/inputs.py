"""Features with three kinds of covariance spectrum, which decide whether a gradient is correct."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

C = 6


def full_rank(batch: int = 2, positions: int = 12) -> Tensor:
    """More positions than channels."""
    generator = torch.Generator().manual_seed(11)
    return torch.randn(batch, C, positions, generator=generator, dtype=torch.float64) + 0.5


def rank_deficient(batch: int = 2, positions: int = 5) -> Tensor:
    """Fewer positions than channels. Small changes keep the rank, also that of the centered features."""
    return full_rank(batch, positions)


def repeated(batch: int = 2) -> Tensor:
    """Return features whose covariance and second moment have eigenvalues 1, 1, 1, 2, 2, 3.

    The features are the columns of ``±√(nλ) u``. They are centered by construction, so covariance and second
    moment are equal. The basis is not aligned with the channels.
    """
    rng = np.random.default_rng(5)
    images = []
    for _ in range(batch):
        basis, _ = np.linalg.qr(rng.standard_normal((C, C)))
        half = basis * np.sqrt(C * np.array([1.0, 1.0, 1.0, 2.0, 2.0, 3.0]))
        images.append(np.concatenate([half, -half], axis=1))
    return torch.from_numpy(np.stack(images))


SPECTRA = {"full rank": full_rank, "rank-deficient": rank_deficient, "repeated": repeated}
