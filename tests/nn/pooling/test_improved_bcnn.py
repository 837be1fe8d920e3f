"""Improved B-CNN: six ways to compute one function, against scipy and finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch

from covpool.nn.pooling import METHODS
from covpool.nn.pooling.bcnn import BACKWARDS, FORWARDS
from tests.functional.cover import grid
from tests.nn.pooling.inputs import SPECTRA, C, full_rank
from tests.nn.pooling.oracle import check_gradient, pooled, second_moment, upper

EXACT = {"steps": 30, "backward_steps": 30}
ways = pytest.mark.parametrize(
    ("forward", "backward"), [(forward, backward) for forward in FORWARDS for backward in BACKWARDS]
)


@pytest.mark.parametrize("forward", FORWARDS)
def test_is_three_normalisations_in_a_row(forward: str) -> None:
    x = full_rank()
    expected = []
    for moment in second_moment(x):
        entries = upper(scipy.linalg.sqrtm(moment))
        signed = np.copysign(np.sqrt(np.abs(entries)), entries)
        expected.append(signed / np.sqrt((signed**2).sum()))
    np.testing.assert_allclose(pooled("improved_bcnn", x, forward=forward, **EXACT), expected, atol=1e-9)


@grid({}, spectrum=list(SPECTRA), forward=list(FORWARDS), backward=list(BACKWARDS))
def test_gradient_of_a_root_that_has_converged(spectrum: str, forward: str, backward: str) -> None:
    if spectrum == "rank-deficient" and forward == "newton_schulz" and backward == "lyapunov_iteration":
        # 30 steps amplify rounding in the null space by 1.5^30. Fewer steps are enough.
        options = {"steps": 22, "backward_steps": 18}
    else:
        options = EXACT
    check_gradient("improved_bcnn", SPECTRA[spectrum](), forward=forward, backward=backward, **options)


@ways
def test_after_few_steps_the_gradient_is_near(forward: str, backward: str) -> None:
    """Test the error relative to the exact gradient, with default steps, in float32, at the paper's size."""
    x = torch.randn(1, 64, 169, generator=torch.Generator().manual_seed(1)).relu()
    upstream = torch.randn(1, 64 * 65 // 2, generator=torch.Generator().manual_seed(2))

    def gradient(**options: object) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(METHODS["improved_bcnn"](64, **options)(leaf), leaf, upstream)[0]

    exact = gradient(forward="svd", backward="svd")
    off = (gradient(forward=forward, backward=backward) - exact).norm() / exact.norm()
    assert off < 0.05


def test_a_root_that_is_less_steep() -> None:
    x, eps = full_rank(), 0.01
    expected = []
    for moment in second_moment(x):
        entries = upper(scipy.linalg.sqrtm(moment))
        entries /= np.sqrt((entries**2).sum())
        signed = np.copysign(np.sqrt(np.abs(entries) + eps) - np.sqrt(eps), entries)
        expected.append(signed / np.sqrt((signed**2).sum()))
    for scaled in (x, 1e6 * x):
        np.testing.assert_allclose(pooled("improved_bcnn", scaled, eps=eps), expected, atol=1e-9)
    check_gradient("improved_bcnn", x, eps=eps)


def test_with_it_the_gradient_in_float32_has_digits() -> None:
    """On sparse ReLU features, as in a network, the float32 gradient is inaccurate without eps."""
    x = torch.randn(4, 64, 49, generator=torch.Generator().manual_seed(1)).sub(1).relu()
    upstream = torch.randn(4, 64 * 65 // 2, generator=torch.Generator().manual_seed(2))

    def off(eps: float) -> torch.Tensor:
        gradients = []
        for dtype in (torch.float32, torch.float64):
            leaf = x.to(dtype).requires_grad_()
            pooling = METHODS["improved_bcnn"](64, eps=eps)
            gradients.append(torch.autograd.grad(pooling(leaf), leaf, upstream.to(dtype))[0].double())
        rough, exact = gradients
        return (rough - exact).norm() / exact.norm()

    assert off(0.01) < 1e-3 < off(0.0)


@pytest.mark.parametrize("eps", [-0.1, float("nan"), float("inf")])
def test_eps_is_no_less_than_zero(eps: float) -> None:
    with pytest.raises(ValueError, match="eps must be at least 0"):
        METHODS["improved_bcnn"](C, eps=eps)


def test_an_option_of_another_method() -> None:
    with pytest.raises(ValueError, match="forward must be one of 'newton_schulz', 'svd'; got 'pade'"):
        METHODS["improved_bcnn"](C, forward="pade")
