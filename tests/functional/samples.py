"""Ordinary inputs."""

from __future__ import annotations

import torch
from torch import Tensor


def features(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Features with an offset and channels of different spread."""
    return torch.randn(shape, dtype=dtype) * torch.linspace(0.5, 2.0, shape[-2], dtype=dtype)[:, None] + 1.0


def positive_weights(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Weights well away from zero."""
    return torch.rand(shape, dtype=dtype) + 0.1
