"""MPN-COV against scipy's fractional powers and against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg

from tests.functional.cover import grid
from tests.nn.pooling.inputs import SPECTRA, full_rank
from tests.nn.pooling.oracle import check_gradient, covariance, pooled, upper

GRID = grid(
    {},
    spectrum=list(SPECTRA),
    power=[0.3, 0.5, 1.0],
    post_normalization=["none", "spectral", "frobenius"],
)


@pytest.mark.parametrize("power", [0.25, 0.5, 0.8, 1.0])
def test_is_the_power_of_the_covariance(power: float) -> None:
    x = full_rank()
    expected = [upper(scipy.linalg.fractional_matrix_power(sigma, power)) for sigma in covariance(x)]
    np.testing.assert_allclose(pooled("mpn_cov", x, power=power), expected, atol=1e-12)


@pytest.mark.parametrize(("post_normalization", "order"), [("spectral", 2), ("frobenius", "fro")])
def test_post_normalisations(post_normalization: str, order: object) -> None:
    x = full_rank()
    roots = [scipy.linalg.sqrtm(sigma) for sigma in covariance(x)]
    expected = [upper(root / np.linalg.norm(root, order)) for root in roots]
    found = pooled("mpn_cov", x, post_normalization=post_normalization)
    np.testing.assert_allclose(found, expected, atol=1e-12)


@GRID
def test_gradient(spectrum: str, power: float, post_normalization: str) -> None:
    check_gradient("mpn_cov", SPECTRA[spectrum](), power=power, post_normalization=post_normalization)
