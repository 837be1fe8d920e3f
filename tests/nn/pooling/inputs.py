"""Features whose covariance is of the three kinds that decide whether a gradient is right."""

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
    """Fewer positions than channels: every small change keeps the rank, that of the centred too."""
    return full_rank(batch, positions)


def repeated(batch: int = 2) -> Tensor:
    """A covariance (or second moment) whose eigenvalues are 1, 1, 1, 2, 2, 3, in a basis of no channel.

    The features are the columns of ``±√(nλ) u``: centred by construction, so that both are the same.
    """
    rng = np.random.default_rng(5)
    images = []
    for _ in range(batch):
        basis, _ = np.linalg.qr(rng.standard_normal((C, C)))
        half = basis * np.sqrt(C * np.array([1.0, 1.0, 1.0, 2.0, 2.0, 3.0]))
        images.append(np.concatenate([half, -half], axis=1))
    return torch.from_numpy(np.stack(images))


SPECTRA = {"full rank": full_rank, "rank-deficient": rank_deficient, "repeated": repeated}
