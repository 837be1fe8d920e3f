"""B-CNN against loops in numpy and against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from covpool.nn.pooling import METHODS
from tests.nn.pooling.inputs import SPECTRA
from tests.nn.pooling.oracle import check_gradient, pooled, second_moment, upper, value_and_gradient

make = METHODS["bcnn"]


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_is_the_normalised_root_of_the_second_moment(spectrum: str) -> None:
    x = SPECTRA[spectrum]()
    for row, p in zip(pooled("bcnn", x), second_moment(x), strict=True):
        y = np.array([np.sign(entry) * abs(entry) ** 0.5 for entry in upper(p)])
        np.testing.assert_allclose(row, y / sum(y**2) ** 0.5, atol=1e-14)


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_gradient(spectrum: str) -> None:
    check_gradient("bcnn", SPECTRA[spectrum]())


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e37])
def test_is_the_same_at_every_scale(scale: float) -> None:
    x = torch.rand(2, 4, 7) - 0.5
    v, gradient = value_and_gradient(make(4), x)
    scaled, scaled_gradient = value_and_gradient(make(4), x * scale)
    torch.testing.assert_close(scaled, v, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scaled_gradient * scale, gradient, rtol=1e-3, atol=1e-3)
