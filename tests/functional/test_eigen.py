"""Functions of eigenvalues: values against scipy, gradients against finite differences, hard cases."""

from __future__ import annotations

from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch

from covpool.functional import matrix_log, matrix_power
from covpool.functional.eigen import LogOfShifted, Power, ScalarFunction, spectrum
from tests.functional.samples import definite
from tests.functional.tolerances import assert_close


@pytest.mark.parametrize("power", [0.2, 0.5, 1.0, 1.7])
def test_power_by_scipy(power: float) -> None:
    a = definite(0.1, 0.5, 2.0, 7.0)
    expected = scipy.linalg.fractional_matrix_power(a[0].numpy(), power)
    np.testing.assert_allclose(matrix_power(a, power)[0], expected, atol=1e-12)


def test_logarithm_by_scipy() -> None:
    a = definite(0.1, 0.5, 2.0, 7.0)
    expected = scipy.linalg.logm(a[0].numpy() + 0.3 * np.eye(4))
    np.testing.assert_allclose(matrix_log(a, eps=0.3)[0], expected, atol=1e-12)


@pytest.mark.parametrize("eigenvalues", [(0.1, 0.5, 2.0), (1.0, 1.0, 3.0), (2.0, 2.0, 2.0)], ids=str)
@pytest.mark.parametrize("power", [0.3, 0.5, 1.5])
def test_gradient_of_the_power(eigenvalues: tuple[float, ...], power: float) -> None:
    a = definite(*eigenvalues).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: matrix_power((a + a.mT) / 2, power), a)


@pytest.mark.parametrize("eigenvalues", [(0.1, 0.5, 2.0), (0.0, 0.0, 3.0), (2.0, 2.0, 2.0)], ids=str)
def test_gradient_of_the_logarithm(eigenvalues: tuple[float, ...]) -> None:
    a = definite(*eigenvalues).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: matrix_log((a + a.mT) / 2 + 0.01 * torch.eye(3), eps=0.1), a)


@pytest.mark.parametrize("distance", [1e-15, 1e-12, 1e-8, 1e-4, 0.3, 0.9, 1 - 1e-9])
@pytest.mark.parametrize(
    ("function", "exact"),
    [
        (Power(0.5), lambda x: x.sqrt()),
        (Power(0.3), lambda x: (x.ln() * Decimal.from_float(0.3)).exp()),
        (LogOfShifted(0.25), lambda x: (x + Decimal("0.25")).ln()),
    ],
    ids=["root", "power", "logarithm"],
)
def test_divided_differences_of_near_and_far_eigenvalues(
    function: ScalarFunction, exact: object, distance: float
) -> None:
    """Compare with 60 decimal digits, where subtracting nearby numbers loses no accuracy."""
    low, high = 3.0 * (1.0 - distance), 3.0
    with localcontext() as context:
        context.prec = 60
        expected = (exact(Decimal(high)) - exact(Decimal(low))) / (Decimal(high) - Decimal(low))
    found = function.divided_differences(torch.tensor([[low, high]], dtype=torch.float64))
    assert found[0, 0, 1].item() == pytest.approx(float(expected), rel=1e-14)
    assert torch.equal(found, found.mT)


def test_zero_eigenvalues_stay_zero_with_no_part_in_the_gradient() -> None:
    a = definite(0.0, 0.0, 1.0, 4.0, dtype=torch.float32).requires_grad_()
    root = matrix_power(a, 0.5)
    assert torch.linalg.eigvalsh(root.detach())[0, :2].abs().max() < 1e-6
    (grad,) = torch.autograd.grad(root, a, torch.randn_like(root))
    null = spectrum(a.detach()).vectors[:, :, :2]
    assert (null.mT @ grad @ null).abs().max() < 1e-6
    assert grad.isfinite().all()


def test_a_broken_matrix_breaks_no_other() -> None:
    a = definite(1.0, 2.0, 3.0).repeat(3, 1, 1)
    a[1, 0, 0] = torch.nan
    result = matrix_power(a, 0.5)
    assert result[1].isnan().all()
    assert_close(result[::2], matrix_power(a[::2], 0.5))


def test_a_decomposition_that_does_not_converge_is_done_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    a = definite(0.0, 1.0, 2.0, 5.0, dtype=torch.float32)
    expected = matrix_power(a)
    asked = []

    def eigh(matrix: torch.Tensor, decompose: Any = torch.linalg.eigh) -> Any:
        asked.append(matrix.dtype)
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("linalg.eigh: the algorithm failed to converge")
        return decompose(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    found = matrix_power(a)
    assert asked == [torch.float32, torch.float64]
    assert found.dtype == torch.float32
    assert_close(found, expected, 1e-5)


def test_entries_that_make_the_library_underflow() -> None:
    """For such a matrix, 7×7 in float32, LAPACK itself returns NaN on some machines."""
    features = torch.tensor([[3.5e-13] * 6 + [1.0]])
    a = (features.mT @ features)[None]
    assert_close(matrix_power(a, 0.5), a.clone(), relative=1e-6)


@pytest.mark.parametrize("function", [lambda a: matrix_power(a, 0.5), lambda a: matrix_log(a, eps=0.1)])
def test_a_second_derivative_is_refused(function: object) -> None:
    a = definite(1.0, 2.0, 3.0).requires_grad_()
    for upstream in (torch.ones_like(a), torch.ones_like(a).requires_grad_()):
        (grad,) = torch.autograd.grad(function(a), a, upstream, create_graph=True)
        with pytest.raises(RuntimeError, match="can be differentiated only once"):
            grad.square().sum().backward()


def test_first_derivatives_by_torch_func() -> None:
    a = definite(1.0, 2.0, 3.0)
    expected = torch.autograd.grad(matrix_power(a.requires_grad_(), 0.5).sum(), a)[0]
    assert_close(torch.func.grad(lambda a: matrix_power(a, 0.5).sum())(a.detach()), expected)
    batch = a.detach().repeat(4, 1, 1, 1)
    assert_close(torch.func.vmap(torch.func.grad(lambda a: matrix_power(a, 0.5).sum()))(batch)[2], expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: matrix_power(torch.eye(2), 0.0), "power must be above 0; got 0.0"),
        (lambda: matrix_log(torch.eye(2), eps=-1.0), "eps must be above 0; got -1.0"),
        (lambda: matrix_power(torch.ones(2, 3)), "a must be square matrices"),
    ],
)
def test_mistakes(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
