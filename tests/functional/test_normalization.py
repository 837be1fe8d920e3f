"""Pre-normalization and post-compensation: Eqns. (3), (4), (5), (8), (9) and (10), one at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from covpool.functional import matrix_sqrt
from tests.functional import paper
from tests.functional.samples import chosen
from tests.functional.tolerances import assert_close

NORMALIZATIONS = ["trace", "frobenius"]
DTYPES = [torch.float64, torch.float32]


def covariances(dtype: torch.dtype = torch.float64) -> Tensor:
    """Return positive definite matrices of different scales, none with norm one."""
    torch.manual_seed(2)
    half = torch.randn(3, 5, 7, dtype=dtype) * torch.tensor([0.3, 1.0, 40.0], dtype=dtype)[:, None, None]
    return half @ half.mT


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equations_3_and_4(normalization: str, dtype: torch.dtype) -> None:
    """A = Σ/t before the iteration; C = √t Y_N after it, or Y_N itself without compensation."""
    sigma = covariances(dtype)
    t = {
        "trace": sum(sigma[:, i, i] for i in range(5)),
        "frobenius": sum(sigma[:, i, j] ** 2 for i in range(5) for j in range(5)).sqrt(),
    }[normalization][:, None, None]
    y = paper.newton_schulz(sigma / t, 5)[0][-1]
    matched = matrix_sqrt(sigma, iteration="paper", normalization=normalization)
    bare = matrix_sqrt(sigma, iteration="paper", normalization=normalization, compensation="none")
    for image in range(3):  # one at a time: their scales differ by four orders of magnitude
        assert_close(matched[image], (t.sqrt() * y)[image])
        assert_close(bare[image], y[image])


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("compensation", ["matched", "none"])
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_of_the_three_layers(
    normalization: str, compensation: str, steps: int, dtype: torch.dtype
) -> None:
    """Eqns. (5), (6), (7), (8), or (9), (6), (7), (10), in sequence, for an asymmetric gradient."""
    sigma = covariances(dtype)
    t = paper.NORMS[normalization](sigma)
    ys, zs = paper.newton_schulz(sigma / t, steps)
    grad_c = torch.randn_like(sigma)
    if compensation == "matched":
        grad_y, grad_post = paper.post_compensation_backward(grad_c, ys[-1], sigma, normalization)
    else:
        grad_y, grad_post = grad_c, torch.zeros_like(sigma)
    grad_a = paper.newton_schulz_backward(grad_y, torch.zeros_like(grad_y), ys, zs)
    expected = paper.pre_normalization_backward(grad_a, grad_post, sigma, normalization)

    leaf = sigma.clone().requires_grad_()
    root = matrix_sqrt(leaf, **chosen(steps), normalization=normalization, compensation=compensation)
    (actual,) = torch.autograd.grad(root, leaf, grad_c)
    for image in range(3):
        assert_close(actual[image], paper.symmetric(expected)[image])


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_equations_5_and_9_are_the_gradient(normalization: str) -> None:
    """Autograd through C = √t Y agrees with (5), or (9), so the oracle is correct."""
    sigma, y = covariances().requires_grad_(), torch.randn(3, 5, 5, dtype=torch.float64).requires_grad_()
    grad_c = torch.randn_like(y)
    c = paper.NORMS[normalization](sigma).sqrt() * y
    expected = torch.autograd.grad(c, (y, sigma), grad_c)
    actual = paper.post_compensation_backward(grad_c, y.detach(), sigma.detach(), normalization)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a.expand_as(e), e)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_equations_8_and_10_are_the_gradient(normalization: str) -> None:
    """Autograd through A = Σ/t agrees with (8), or (10), so the oracle is correct."""
    sigma = covariances().requires_grad_()
    grad_a, grad_post = torch.randn_like(sigma), torch.randn_like(sigma)
    (through_a,) = torch.autograd.grad(sigma / paper.NORMS[normalization](sigma), sigma, grad_a)
    actual = paper.pre_normalization_backward(grad_a, grad_post, sigma.detach(), normalization)
    assert_close(actual, through_a + grad_post)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_the_root_does_not_depend_on_the_norm(normalization: str) -> None:
    """With compensation and enough steps, both norms give the exact root."""
    sigma = covariances()
    root = matrix_sqrt(sigma, **chosen(30), normalization=normalization)
    assert_close(root @ root, sigma)
