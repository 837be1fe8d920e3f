"""Optimal polynomials, compared with a linear program for the best polynomial and with scipy's root."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import torch

from covpool.functional import matrix_sqrt, polar_express_sqrt
from covpool.functional.polar_express import optimal_polynomials
from tests.functional.counting import count_value_and_gradient
from tests.functional.samples import definite
from tests.functional.tolerances import assert_close


def largest_error(polynomial: object, low: float, high: float) -> float:
    return max(abs(1 - polynomial(float(x))) for x in np.linspace(low, high, 20001))


@pytest.mark.parametrize("lower", [1e-3, 0.05, 0.4])
def test_each_polynomial_is_the_best_of_its_interval(lower: float) -> None:
    """Chebyshev approximation as a linear program: minimize e under |1 − p(x)| ≤ e at many x."""
    low, high = lower, 1.0
    for polynomial in optimal_polynomials(lower, 3):
        x = np.linspace(low, high, 2000)
        basis = np.stack([x, x**3, x**5], axis=1)
        ones = np.ones((len(x), 1))
        solution = scipy.optimize.linprog(
            [0, 0, 0, 1],
            A_ub=np.block([[basis, -ones], [-basis, -ones]]),
            b_ub=np.concatenate([np.ones(len(x)), -np.ones(len(x))]),
            bounds=[(None, None)] * 3 + [(0, None)],
        )
        assert largest_error(polynomial, low, high) == pytest.approx(solution.fun, rel=1e-3, abs=1e-7)
        low = polynomial(low)
        high = 2 - low


def test_the_first_polynomial_of_a_wide_interval_grows_small_values_most() -> None:
    """Newton-Schulz multiplies a small value by 1.5 per step."""
    assert optimal_polynomials(1e-3, 1)[0].a > 8


def test_the_last_polynomials_are_those_of_values_near_one() -> None:
    np.testing.assert_allclose(optimal_polynomials(0.4, 8)[-1], (15 / 8, -10 / 8, 3 / 8))


def test_tends_to_the_root() -> None:
    a = definite(0.01, 0.5, 1.0, 4.0)
    expected = torch.from_numpy(scipy.linalg.sqrtm(a[0].numpy()))[None]
    assert_close(polar_express_sqrt(a, steps=10, lower=1e-2), expected)


def test_is_nearer_than_newton_schulz_for_as_many_products() -> None:
    """Compare 17 products with 18, on a spectrum that decays like that of features, within the bound."""
    values = torch.logspace(0, -3.5, 40, dtype=torch.float64)
    a = definite(*values.tolist())
    exact = torch.from_numpy(scipy.linalg.sqrtm(a[0].numpy()))[None]

    def error(root: torch.Tensor) -> float:
        return ((root - exact).norm() / exact.norm()).item()

    ours = error(polar_express_sqrt(a, steps=5, lower=1e-2))
    theirs = error(matrix_sqrt(a, iteration="paper", steps=7, normalization="frobenius"))
    assert ours < 0.7 * theirs


def test_zero_stays_zero_and_too_small_stays_small() -> None:
    a = definite(0.0, 1e-8, 1.0, 2.0)
    values = torch.linalg.eigvalsh(polar_express_sqrt(a, steps=5, lower=0.1))[0]
    assert abs(values[0].item()) < 1e-12
    assert 0 < values[1].item() < 1e-4


def test_cost_in_products() -> None:
    value, gradient = count_value_and_gradient(
        lambda a: polar_express_sqrt(a, steps=5), definite(0.5, 1.0, 2.0)
    )
    assert value.count == 17
    assert gradient.count == 34


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lower": 0.0}, "lower must be a number between 0 and 1; got 0.0"),
        ({"lower": 1.5}, "lower must be a number between 0 and 1"),
        ({"steps": 0}, "steps must be at least 1"),
    ],
)
def test_mistakes(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        polar_express_sqrt(torch.eye(3), **options)
