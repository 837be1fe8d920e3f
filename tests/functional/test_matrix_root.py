"""Roots with separate value and gradient methods: values against an oracle, gradients against scipy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.interpolate
import scipy.linalg
import scipy.special
import torch
from torch import Tensor

from covpool.functional.matrix_root import RootOptions, matrix_root, solve_by_eigenvalues, solve_by_iteration
from tests.functional.samples import definite
from tests.functional.tolerances import assert_close

SPECTRUM = (0.4, 0.7, 1.0, 2.0)


def by_eigenvalues(a: Tensor, function: object) -> np.ndarray:
    """Apply a function to the eigenvalues divided by the Frobenius norm, with numpy."""
    values, vectors = np.linalg.eigh(a[0].numpy())
    norm = np.sqrt((values**2).sum())
    return (vectors * (np.sqrt(norm) * function(values / norm))) @ vectors.T


@pytest.mark.parametrize("degree", [2, 5, 7])
def test_pade_by_scipy(degree: int) -> None:
    """Compare with λ times scipy's Padé quotient of the series of 1/√(1−z)."""
    series = [scipy.special.binom(-0.5, k) * (-1) ** k for k in range(2 * degree)]
    upper, lower = scipy.interpolate.pade(series, degree, degree - 1)
    a = definite(*SPECTRUM)
    expected = by_eigenvalues(a, lambda x: x * upper(1 - x) / lower(1 - x))
    np.testing.assert_allclose(matrix_root(a, RootOptions("pade", "svd", degree))[0], expected, atol=1e-9)


@pytest.mark.parametrize("degree", [1, 3, 11])
def test_taylor_by_numpy(degree: int) -> None:
    series = [scipy.special.binom(-0.5, k) * (-1) ** k for k in range(degree)]
    a = definite(*SPECTRUM)
    expected = by_eigenvalues(a, lambda x: x * np.polynomial.polynomial.polyval(1 - x, series))
    np.testing.assert_allclose(matrix_root(a, RootOptions("taylor", "svd", degree))[0], expected, atol=1e-12)


@pytest.mark.parametrize(
    ("forward", "order"), [("svd", 1), ("newton_schulz", 20), ("pade", 16), ("taylor", 900)]
)
def test_every_value_tends_to_the_root(forward: str, order: int) -> None:
    a = definite(*SPECTRUM)
    expected = torch.from_numpy(scipy.linalg.sqrtm(a[0].numpy()))[None]
    assert_close(matrix_root(a, RootOptions(forward, "svd", order)), expected, relative=1e-10)


@pytest.mark.parametrize(("forward", "order"), [("newton_schulz", 5), ("pade", 5), ("taylor", 11)])
def test_zero_eigenvalues_stay_zero(forward: str, order: int) -> None:
    """The usual Padé approximant fails here: it maps a zero eigenvalue to 1/11 of the root of the norm."""
    a = definite(0.0, 0.0, 1.0, 2.0)
    root = matrix_root(a, RootOptions(forward, "svd", order))
    assert torch.linalg.eigvalsh(root)[0, :2].abs().max() < 1e-12


@pytest.mark.parametrize(("forward", "order"), [("newton_schulz", 5), ("pade", 5), ("taylor", 11)])
def test_each_matrix_has_its_own_norm(forward: str, order: int) -> None:
    """With one norm over the batch, images would depend on each other."""
    a, options = definite(*SPECTRUM), RootOptions(forward, "lyapunov_iteration", order, 8)
    batch = torch.cat([a, 1e6 * a]).requires_grad_()
    together = matrix_root(batch, options)
    assert_close(together[:1].detach(), matrix_root(a, options))
    (grad,) = torch.autograd.grad(together, batch, torch.ones_like(batch))
    alone = a.clone().requires_grad_()
    expected = torch.autograd.grad(matrix_root(alone, options), alone, torch.ones_like(a))[0]
    assert_close(grad[:1], expected)
    assert_close(grad[1:], expected / 1e3)


def test_lyapunov_by_scipy() -> None:
    root, grad = definite(*SPECTRUM), definite(-1.0, 0.5, 1.0, 2.0)
    expected = torch.from_numpy(scipy.linalg.solve_continuous_lyapunov(root[0].numpy(), grad[0].numpy()))[
        None
    ]
    assert_close(solve_by_eigenvalues(root, grad), expected)
    assert_close(solve_by_iteration(root, grad, 12), expected)


def test_lyapunov_of_a_singular_root() -> None:
    """Check the blocks that involve the range, for both solvers. The null-null block is not compared."""
    root, generator = definite(0.0, 0.0, 1.0, 2.0), torch.Generator().manual_seed(2)
    grad = torch.randn(1, 4, 4, generator=generator, dtype=torch.float64)
    grad = grad + grad.mT
    _, vectors = torch.linalg.eigh(root)
    for x in (solve_by_eigenvalues(root, grad), solve_by_iteration(root, grad, 25)):
        turned, expected = vectors.mT @ x @ vectors, vectors.mT @ grad @ vectors
        sums = torch.tensor([0.0, 0.0, 1.0, 2.0], dtype=torch.float64)
        sums = sums[:, None] + sums
        np.testing.assert_allclose(turned[0, 2:], (expected / sums)[0, 2:], atol=1e-9)
        assert x.isfinite().all()


def test_the_iteration_falls_short_of_small_eigenvalues() -> None:
    """The iteration is not exact: for s at 1/20 of the largest eigenvalue it needs about a dozen steps."""
    root = definite(0.05, 1.0)
    direction = torch.linalg.eigh(root)[1][:, :, :1]
    grad = direction @ direction.mT
    exact = solve_by_eigenvalues(root, grad).norm()
    ratios = [(solve_by_iteration(root, grad, steps).norm() / exact).item() for steps in (2, 4, 8, 14)]
    assert ratios[0] < 0.3 < ratios[1] < 0.7 < ratios[2] < 1.1
    assert ratios[3] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("backward", ["svd", "lyapunov", "lyapunov_iteration"])
@pytest.mark.parametrize("forward", ["svd", "newton_schulz"])
def test_every_gradient_is_that_of_the_root(forward: str, backward: str) -> None:
    options = RootOptions(forward, backward, 20, 20)
    a = definite(0.5, 1.0, 1.0, 2.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: matrix_root((a + a.mT) / 2, options), a)


@pytest.mark.parametrize("exponent", [-24, -12, 12, 24])
@pytest.mark.parametrize("forward", ["svd", "newton_schulz", "pade", "taylor"])
def test_any_scale(forward: str, exponent: int) -> None:
    options = RootOptions(forward, "lyapunov_iteration", 8, 8)
    a = definite(*SPECTRUM, dtype=torch.float32)
    large = (a * 10.0**exponent).requires_grad_()
    root = matrix_root(large, options)
    assert_close(root.detach() / 10.0 ** (exponent / 2), matrix_root(a, options), relative=1e-4)
    (grad,) = torch.autograd.grad(root, large, torch.ones_like(root))
    assert grad.isfinite().all()
    assert grad.abs().max() > 0
