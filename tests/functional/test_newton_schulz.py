"""The iteration on plain tensors: Eqn. (2), Eqns. (6) and (7), accuracy and stability."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from scipy.linalg import sqrtm
from torch import Tensor

from covpool.functional.newton_schulz import (
    Coefficients,
    fitted_steps,
    newton_schulz,
    newton_schulz_backward,
    newton_schulz_jvp,
    paper_steps,
)
from tests.functional import paper
from tests.functional.samples import UNEVEN
from tests.functional.tolerances import assert_close

PAPER = [pytest.param(paper_steps(steps), id=f"{steps}") for steps in range(1, 8)]
OTHER = [pytest.param(UNEVEN[:steps], id=f"uneven {steps}") for steps in (1, 2, 3, 4)]
DTYPES = [torch.float64, torch.float32]


def normalised(batch: int, m: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return positive definite matrices with trace one."""
    torch.manual_seed(m)
    half = torch.randn(batch, m, m + 2, dtype=dtype)
    a = half @ half.mT
    return a / paper.trace(a)


def with_eigenvalues(*eigenvalues: float) -> Tensor:
    """Return one symmetric matrix, ``(1, m, m)``, with these eigenvalues in a random basis."""
    torch.manual_seed(0)
    m = len(eigenvalues)
    q, _ = torch.linalg.qr(torch.randn(m, m, dtype=torch.float64))
    return ((q * torch.tensor(eigenvalues, dtype=torch.float64)) @ q.mT)[None]


@pytest.mark.parametrize("steps", PAPER + OTHER)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inverse", [False, True])
def test_equation_2(steps: Coefficients, dtype: torch.dtype, inverse: bool) -> None:
    """Value and iterates equal those of the coupled iteration."""
    a = normalised(3, 6, dtype)
    ys, zs = paper.newton_schulz(a, steps)
    result, iterates = newton_schulz(a.clone(), steps, inverse)
    assert_close(result, (zs if inverse else ys)[-1])
    for k, (y, z) in enumerate(iterates.pairs(), start=1):
        assert_close(y, ys[k])
        assert_close(z, zs[k])


@pytest.mark.parametrize("steps", PAPER)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equations_6_and_7(steps: Coefficients, dtype: torch.dtype) -> None:
    """The library's gradient of the root equals the paper's, symmetrized."""
    a = normalised(3, 6, dtype)
    grad = torch.randn_like(a)
    expected = paper.newton_schulz_backward(grad, torch.zeros_like(grad), *paper.newton_schulz(a, steps))
    _, iterates = newton_schulz(a, steps)
    actual = newton_schulz_backward(paper.symmetric(grad), iterates)
    assert_close(actual, paper.symmetric(expected))


@pytest.mark.parametrize("steps", PAPER)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equations_6_and_7_from_z(steps: Coefficients, dtype: torch.dtype) -> None:
    """The same equations, started from a gradient of Z_N, give the gradient of the inverse root."""
    a = normalised(3, 6, dtype)
    grad = torch.randn_like(a)
    expected = paper.newton_schulz_backward(torch.zeros_like(grad), grad, *paper.newton_schulz(a, steps))
    _, iterates = newton_schulz(a, steps, inverse=True)
    actual = newton_schulz_backward(paper.symmetric(grad), iterates, inverse=True)
    assert_close(actual, paper.symmetric(expected))


@pytest.mark.parametrize("steps", PAPER)
@pytest.mark.parametrize("inverse", [False, True])
def test_the_equations_are_the_gradient(steps: Coefficients, inverse: bool) -> None:
    """The paper's Eqns. (6) and (7) agree with autograd through Eqn. (2), so the oracle is correct."""
    a = normalised(2, 4).requires_grad_()
    ys, zs = paper.newton_schulz(a, steps)
    grad = torch.randn_like(a)
    zero = torch.zeros_like(grad)
    (expected,) = torch.autograd.grad((zs if inverse else ys)[-1], a, grad)
    grads = (zero, grad) if inverse else (grad, zero)
    actual = paper.newton_schulz_backward(*grads, [y.detach() for y in ys], [z.detach() for z in zs])
    assert_close(actual, expected)


@pytest.mark.parametrize("steps", PAPER + OTHER)
@pytest.mark.parametrize("inverse", [False, True])
def test_tangent(steps: Coefficients, inverse: bool) -> None:
    """The tangent is the adjoint of the gradient, and equals torch's own tangent through Eqn. (2)."""
    a = normalised(2, 5)
    tangent = paper.symmetric(torch.randn_like(a))
    _, iterates = newton_schulz(a, steps, inverse)
    actual = newton_schulz_jvp(tangent, iterates, inverse)

    def plain(a: Tensor) -> Tensor:
        return paper.newton_schulz(a, steps)[1 if inverse else 0][-1]

    assert_close(actual, torch.func.jvp(plain, (a,), (tangent,))[1])
    grad = paper.symmetric(torch.randn_like(a))
    left, right = (grad * actual).sum(), tangent * newton_schulz_backward(grad.clone(), iterates, inverse)
    assert_close(left, right.sum())


@pytest.mark.parametrize("steps", OTHER)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_for_any_coefficients(steps: Coefficients, inverse: bool, dtype: torch.dtype) -> None:
    """The library's gradient equals autograd through the iteration as written."""
    a = normalised(3, 6, dtype).requires_grad_()
    grad = paper.symmetric(torch.randn_like(a))
    (expected,) = torch.autograd.grad(paper.newton_schulz(a, steps)[inverse][-1], a, grad)
    _, iterates = newton_schulz(a.detach(), steps, inverse)
    assert_close(newton_schulz_backward(grad, iterates, inverse), paper.symmetric(expected))


def test_error_falls_to_rounding_and_stays() -> None:
    """The error against scipy's root falls at every step to below 1e-10, and stays there up to 30 steps."""
    a = with_eigenvalues(0.3, 0.25, 0.2, 0.15, 0.1)
    root = torch.from_numpy(sqrtm(a[0].numpy()))
    errors = [(newton_schulz(a, paper_steps(steps))[0][0] - root).norm().item() for steps in range(1, 31)]
    converged = next(k for k, error in enumerate(errors) if error < 1e-10)
    assert converged <= 20
    assert all(after < before for before, after in pairwise(errors[: converged + 1]))
    assert max(errors[converged:]) < 1e-10


def test_error_of_an_ill_conditioned_matrix() -> None:
    """A condition number of 1e6 takes three times the steps and loses two digits, but is as stable."""
    a = with_eigenvalues(0.9, 0.09, 0.0099, 0.0001, 0.9e-6)
    root = torch.from_numpy(sqrtm(a[0].numpy()))
    errors = [(newton_schulz(a, paper_steps(steps))[0][0] - root).norm().item() for steps in range(1, 41)]
    assert errors[4] > 1e-2
    assert max(errors[21:]) < 1e-11


def test_inverse_root() -> None:
    """Z_K tends to the inverse of the root."""
    a = with_eigenvalues(0.4, 0.3, 0.2, 0.1)
    inverse_root = torch.linalg.inv(torch.from_numpy(sqrtm(a[0].numpy())))
    assert_close(newton_schulz(a, paper_steps(20), inverse=True)[0][0], inverse_root, 1e-10)


@pytest.mark.parametrize("steps", [1, 5, 12])
def test_zero_eigenvalues_stay_zero(steps: int) -> None:
    """‖A − I‖ is 1 for a rank-deficient A. The iteration then converges only on the range of A."""
    a = with_eigenvalues(0.6, 0.4, 0.0, 0.0)
    eigenvalues, vectors = torch.linalg.eigh(a[0])
    null = vectors[:, eigenvalues < 1e-12]
    assert null.shape[-1] == 2
    root, _ = newton_schulz(a, paper_steps(steps))
    assert (root[0] @ null).abs().max() < 1e-12
    if steps == 12:
        assert_close(root[0], torch.from_numpy(sqrtm(a[0].numpy()).real), 1e-7)


def test_null_space_that_is_exact_stays_exact() -> None:
    """Rows of exact zeros stay exact zeros; rounding does not leak in."""
    a = torch.zeros(1, 4, 4)
    a[0, :2, :2] = torch.tensor([[0.7, 0.1], [0.1, 0.3]])
    root, _ = newton_schulz(a, paper_steps(7))
    assert torch.equal(root[0, 2:], torch.zeros(2, 4))
    assert torch.equal(root[0, :, 2:], torch.zeros(4, 2))


@pytest.mark.parametrize(("steps", "error"), [(3, 0.0211), (4, 0.00031)])
def test_fitted_steps_are_five_of_the_paper(steps: int, error: float) -> None:
    """The fitted steps match five steps of the paper on all eigenvalues. Every T_k is positive definite."""
    a = torch.logspace(-12, 0, 2001, dtype=torch.float64).reshape(-1, 1, 1)
    five, _ = newton_schulz(a, paper_steps(5))
    fitted, _ = newton_schulz(a, fitted_steps(steps))
    worst = (fitted / five - 1).abs().max()
    assert 0.9 * error < worst < error
    a = torch.linspace(0, 1, 2001, dtype=torch.float64).reshape(-1, 1, 1)
    ys, zs = paper.newton_schulz(a, fitted_steps(steps))
    for (of_eye, of_product), y, z in zip(fitted_steps(steps), ys, zs, strict=False):
        assert (of_eye + of_product * z * y).min() > 0


def test_fitted_steps_that_do_not_exist() -> None:
    with pytest.raises(
        ValueError, match='steps must be 3 or 4 for iteration="fitted"; got 5: pass iteration="paper"'
    ):
        fitted_steps(5)
