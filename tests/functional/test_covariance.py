"""Second-order pooling: the convention, weights, derivatives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from covpool.functional import covariance
from tests.functional import paper
from tests.functional.tolerances import assert_close

DTYPES = [torch.float64, torch.float32]


def test_divides_by_the_number_of_positions() -> None:
    """The paper's convention: divide by n, not n − 1."""
    x = torch.tensor([[1.0, 3.0], [2.0, 6.0]])
    assert_close(covariance(x), torch.tensor([[1.0, 2.0], [2.0, 4.0]]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("c", "n"), [(3, 7), (7, 3), (1, 4), (4, 1), (1, 1)])
def test_against_numpy(dtype: torch.dtype, c: int, n: int) -> None:
    x = torch.randn(2, c, n, dtype=dtype)
    for image in x:
        expected = np.cov(image.double().numpy(), bias=True).reshape(c, c)
        assert_close(covariance(image), torch.from_numpy(expected).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_against_numpy(dtype: torch.dtype) -> None:
    x, weights = torch.randn(2, 4, 6, dtype=dtype), torch.rand(2, 6, dtype=dtype)
    result = covariance(x, weights=weights)
    for image, weight, actual in zip(x, weights, result, strict=True):
        expected = np.cov(image.double().numpy(), bias=True, aweights=weight.double().numpy())
        assert_close(actual, torch.from_numpy(expected).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_section_3_1(dtype: torch.dtype) -> None:
    """X Ī Xᵀ with the n×n matrix Ī formed, which the library never does."""
    x = torch.randn(3, 4, 6, dtype=dtype)
    assert_close(covariance(x), paper.covariance(x))


def test_equation_11() -> None:
    """The gradient is (G + Gᵀ) X Ī."""
    x = torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(2, 4, 4, dtype=torch.float64)
    (grad,) = torch.autograd.grad(covariance(x), x, upstream)
    assert_close(grad, paper.covariance_backward(upstream, x.detach()))


@pytest.mark.parametrize("weighted", [False, True])
def test_derivatives(weighted: bool) -> None:
    x = torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True)
    weights = (torch.rand(2, 3, dtype=torch.float64) + 0.1).requires_grad_()
    arguments = (x, weights) if weighted else (x,)

    def f(x: Tensor, weights: Tensor | None = None) -> Tensor:
        return covariance(x, weights=weights)

    assert gradcheck(
        f, arguments, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert gradgradcheck(f, arguments, check_fwd_over_rev=True, check_batched_grad=True)


def test_gradient_of_a_weight_at_zero() -> None:
    """Σ is smooth in the weights, also at zero. The derivative there follows the plain formula."""
    x = torch.randn(1, 3, 4, dtype=torch.float64)
    weights = torch.tensor([[0.5, 0.0, 1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(1, 3, 3, dtype=torch.float64)
    (expected,) = torch.autograd.grad(paper.weighted_covariance(x, weights), weights, upstream)
    (grad,) = torch.autograd.grad(covariance(x, weights=weights), weights, upstream)
    assert_close(grad, expected, 1e-8)


@pytest.mark.parametrize("weighted", [False, True])
def test_mask_and_repetition(weighted: bool) -> None:
    """A mask drops positions; integer weights repeat them."""
    x = torch.randn(3, 4, dtype=torch.float64)
    if weighted:
        counts = torch.tensor([2, 1, 0, 3])
        assert_close(covariance(x, weights=counts.double()), covariance(x.repeat_interleave(counts, -1)))
    else:
        mask = torch.tensor([True, True, False, True])
        assert_close(covariance(x, weights=mask), covariance(x[:, mask]))


def test_constant_channel_is_exactly_zero() -> None:
    """This includes constants whose mean rounds: in float32, the mean of 49 values of 0.1 is not 0.1."""
    x = torch.randn(2, 3, 49)
    x[:, 1] = 0.1
    sigma = covariance(x)
    assert torch.equal(sigma[:, 1], torch.zeros(2, 3))
    assert torch.equal(sigma[:, :, 1], torch.zeros(2, 3))
    assert (sigma[:, 0, 0] > 0).all()


def test_leading_dimensions_and_dtype() -> None:
    x = torch.randn(2, 5, 3, 4)
    assert covariance(x).shape == (2, 5, 3, 3)
    assert covariance(x[0, 0]).shape == (3, 3)
    assert covariance(x[:0]).shape == (0, 5, 3, 3)
    assert covariance(x.half()).dtype == torch.float32
    assert covariance(x.bfloat16()).dtype == torch.float32
    assert covariance(x.double()).dtype == torch.float64
