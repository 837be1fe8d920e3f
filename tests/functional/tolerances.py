"""Tolerances for equality, in one table for all tests of this folder."""

from __future__ import annotations

import torch
from torch import Tensor

# Relative to the largest entry of the expected tensor. Five steps of the iteration lose about one digit.
RELATIVE = {
    torch.float64: 1e-11,
    torch.float32: 1e-5,
}


def assert_close(actual: Tensor, expected: Tensor, relative: float | None = None) -> None:
    """Check equality within ``relative`` (default: by dtype) times the largest expected entry."""
    assert actual.dtype == expected.dtype, f"{actual.dtype} is not {expected.dtype}"
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} is not {tuple(expected.shape)}"
    tolerance = RELATIVE[actual.dtype] if relative is None else relative
    size = expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=tolerance * size)
