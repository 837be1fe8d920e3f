"""Ordinary inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from covpool.functional.newton_schulz import fitted_steps
from tests.functional.paper import Steps

# Coefficients that differ from step to step, so that exchanging two of them changes the result.
UNEVEN = fitted_steps(4)


def chosen(steps: Steps) -> dict[str, Any]:
    """Return the arguments that select steps of the oracle: a number of the paper's, or the fitted ones."""
    if isinstance(steps, int):
        return {"iteration": "paper", "steps": steps}
    assert steps == fitted_steps(len(steps))
    return {"iteration": "fitted", "steps": len(steps)}


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
