"""A spectrum that is known, through every layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from covpool.explain.diagnosis import rounded, summed_up
from covpool.reproduce.spectra.curves import CURVES, EXACT_ROOTS, exact_root, values_out

SEED = 0
# Evenly over six orders of magnitude, and exact zeros beside.
NONZERO, ZEROS, PER_DECADE = 31, 9, 5


def synthetic() -> dict[str, Any]:
    """Values in and out, of trace 1."""
    x, eigenvalues, vectors = known_spectrum()
    out = {curve.label: values_out(curve, x, vectors) for curve in CURVES}
    apart = {name: exact_root(name, x, vectors) - out["mpn_cov"] for name in EXACT_ROOTS}
    return {
        "channels": len(eigenvalues),
        "zeros": ZEROS,
        "in": _numbers(eigenvalues),
        "out": {label: _numbers(values) for label, values in out.items()},
        "figures": {label: summed_up(values) for label, values in out.items()},
        "largest_difference_from_mpn_cov": {
            name: rounded(float(difference.abs().max())) for name, difference in apart.items()
        },
    }


def known_spectrum() -> tuple[Tensor, Tensor, Tensor]:
    """Features ``(1, C, n)`` of mean zero, and the eigenvalues and eigenvectors of their covariance."""
    channels, positions = NONZERO + ZEROS, 2 * (NONZERO + ZEROS)
    generator = torch.Generator().manual_seed(SEED)
    lambdas = 10.0 ** (-torch.arange(NONZERO, dtype=torch.float64) / PER_DECADE)
    lambdas = torch.cat([lambdas / lambdas.sum(), lambdas.new_zeros(ZEROS)])
    vectors = torch.linalg.qr(_noise(channels, channels, generator)).Q
    # Orthonormal over the positions, and all orthogonal to the constant, so that none has a mean.
    constant = torch.ones(positions, 1, dtype=torch.float64)
    with_constant = torch.cat([constant, _noise(positions, channels, generator)], dim=1)
    rows = torch.linalg.qr(with_constant).Q[:, 1:].T
    x = vectors @ ((lambdas * positions).sqrt().unsqueeze(1) * rows)
    return x.unsqueeze(0), lambdas, vectors


def _noise(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, dtype=torch.float64, generator=generator)


def _numbers(values: Tensor) -> list[float]:
    return [rounded(float(value)) for value in values]
