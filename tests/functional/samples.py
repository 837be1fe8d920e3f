"""Ordinary inputs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# Coefficients that differ from step to step, so that exchanging two of them changes the result.
UNEVEN = ((1.9, -0.8), (1.3, -0.45), (1.7, -0.65), (1.2, -0.3))


def features(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Features with an offset and channels of different spread."""
    return torch.randn(shape, dtype=dtype) * torch.linspace(0.5, 2.0, shape[-2], dtype=dtype)[:, None] + 1.0


def positive_weights(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Weights well away from zero."""
    return torch.rand(shape, dtype=dtype) + 0.1


def definite(*eigenvalues: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return a matrix with these eigenvalues in a basis that is not aligned with the axes."""
    basis, _ = np.linalg.qr(np.random.default_rng(1).standard_normal((len(eigenvalues),) * 2))
    return torch.from_numpy(basis * np.array(eigenvalues) @ basis.T).to(dtype)[None]
