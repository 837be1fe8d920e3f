"""The three structured layers against the operator, and each against its equation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from covpool.functional import covariance, matrix_sqrt
from covpool.nn import NewtonSchulz, PostCompensation, PreNormalization
from tests.functional.tolerances import assert_close


def composed(sigma: Tensor, steps: int, normalization: str) -> Tensor:
    a, t = PreNormalization(normalization)(sigma)
    return PostCompensation()(NewtonSchulz("paper", steps)(a), t)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("normalization", ["trace", "frobenius"])
@pytest.mark.parametrize("steps", [1, 2, 5, 7])
@pytest.mark.parametrize("shape", [(6, 20), (2, 3, 6, 4)], ids=["one", "batches of low rank"])
def test_composition_is_matrix_sqrt_in_value_and_gradient(
    shape: tuple[int, ...], steps: int, normalization: str, dtype: torch.dtype
) -> None:
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    sigma = covariance(x)
    one = composed(sigma, steps, normalization)
    other = matrix_sqrt(sigma, iteration="paper", steps=steps, normalization=normalization)
    assert_close(one, other)
    upstream = torch.randn_like(one)  # not symmetric
    for wanted in (sigma, x):
        (a,) = torch.autograd.grad(one, wanted, upstream, retain_graph=True)
        (b,) = torch.autograd.grad(other, wanted, upstream, retain_graph=True)
        assert_close(a, b, relative=None if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("normalization", ["trace", "frobenius"])
def test_pre_normalisation_is_equation_3(normalization: str) -> None:
    sigma = covariance(torch.randn(3, 6, 20))
    a, t = PreNormalization(normalization)(sigma)
    norms = {
        "trace": torch.stack([torch.trace(matrix) for matrix in sigma]),
        "frobenius": torch.linalg.matrix_norm(sigma, "fro"),
    }
    assert_close(t, norms[normalization].reshape(3, 1, 1))
    assert_close(a, sigma / t)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_newton_schulz_is_equation_2(steps: int) -> None:
    a, _ = PreNormalization()(covariance(torch.randn(3, 6, 20)))
    identity = torch.eye(6)
    y, z = a, identity.expand_as(a)
    for _ in range(steps):
        y, z = 0.5 * y @ (3 * identity - z @ y), 0.5 * (3 * identity - z @ y) @ z
    assert_close(NewtonSchulz("paper", steps)(a), y)


def test_post_compensation_is_equation_4() -> None:
    y, t = torch.randn(3, 6, 6), torch.rand(3, 1, 1)
    assert_close(PostCompensation()(y, t), torch.stack([y[i] * t[i].item() ** 0.5 for i in range(3)]))


@pytest.mark.parametrize("normalization", ["trace", "frobenius"])
def test_gradient_of_each_layer(normalization: str) -> None:
    sigma = covariance(torch.randn(2, 4, 9).double()).requires_grad_()
    assert torch.autograd.gradcheck(PreNormalization(normalization), sigma)
    a, t = (tensor.detach().requires_grad_() for tensor in PreNormalization(normalization)(sigma))
    assert torch.autograd.gradcheck(NewtonSchulz(steps=3), a)
    y = NewtonSchulz(steps=3)(a).detach().requires_grad_()
    assert torch.autograd.gradcheck(PostCompensation(), (y, t))


@pytest.mark.parametrize("normalization", ["trace", "frobenius"])
@pytest.mark.parametrize("size", [0.0, 1e-42])
def test_zero_gives_zero_with_zero_gradient(normalization: str, size: float) -> None:
    sigma = (torch.eye(4).expand(2, 4, 4) * size).requires_grad_()
    c = composed(sigma, 5, normalization)
    c.sum().backward()
    assert not c.any()
    assert not sigma.grad.any()


@pytest.mark.parametrize("normalization", ["trace", "frobenius"])
@pytest.mark.parametrize("scale", [1e-24, 1e24])
def test_scale_does_not_matter(normalization: str, scale: float) -> None:
    sigma = covariance(torch.randn(2, 4, 9))
    large = composed(sigma * scale, 5, normalization)
    assert_close(large / scale**0.5, composed(sigma, 5, normalization), relative=1e-4)


def test_half_gives_float32_with_autocast_or_without() -> None:
    sigma = covariance(torch.randn(2, 4, 9)).bfloat16()
    expected = composed(sigma.float(), 5, "trace")
    assert_close(composed(sigma, 5, "trace"), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(composed(sigma.float(), 5, "trace"), expected)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match=r"^normalization must be one of 'trace', 'frobenius'; got 'l2'"):
        PreNormalization("l2")
    with pytest.raises(ValueError, match=r"^steps must be at least 1"):
        NewtonSchulz(steps=0)
    with pytest.raises(ValueError, match=r"^sigma must be square matrices"):
        PreNormalization()(torch.randn(2, 3, 4))


def test_repr_tells_the_options() -> None:
    assert repr(PreNormalization("frobenius")) == "PreNormalization(normalization='frobenius')"
    assert repr(NewtonSchulz("paper", 7)) == "NewtonSchulz(iteration='paper', steps=7)"
