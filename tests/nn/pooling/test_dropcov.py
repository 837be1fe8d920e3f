"""DropCov against loops in numpy, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from covpool.nn import CovPool
from covpool.nn.pooling import METHODS, dropcov
from covpool.nn.pooling.dropcov import DropCov, drop_rate, dropout_gains
from tests.functional.degenerate import KINDS
from tests.nn.pooling.inputs import SPECTRA
from tests.nn.pooling.oracle import Array, covariance, upper, value_and_gradient

make = METHODS["dropcov"]


def at_rate(monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    monkeypatch.setattr(dropcov, "drop_rate", lambda omega, sigma: torch.tensor(rate, dtype=omega.dtype))


def slow_omega(image: Array, kernel: Array) -> Array:
    mean = [0.0, *(sum(row) / len(row) for row in image), 0.0]
    logits = [sum(kernel[i] * mean[c + i] for i in range(3)) for c in range(len(image))]
    exponentials = np.exp(np.array(logits) - max(logits))
    return exponentials / exponentials.sum()


def slow_rate(images: list[Array], omegas: list[Array]) -> float:
    cosines = []
    for image, omega in zip(images, omegas, strict=True):
        rows = np.cov(image, bias=True).sum(1)
        cosines.append((omega @ rows) / np.sqrt((omega @ omega) * (rows @ rows)))
    return float(np.clip(1 - 10 / np.log2(len(omegas[0])) * np.mean(cosines), 0, 1))


def test_in_training() -> None:
    torch.manual_seed(1)
    x = torch.randn(3, 40, 9, dtype=torch.float64)
    pool = DropCov(40).double()
    torch.manual_seed(5)
    result = pool(x).detach().numpy()
    kernel = pool.attention.weight.detach().numpy().ravel()
    omegas = [slow_omega(image, kernel) for image in x.numpy()]
    images = [image * (1 + omega)[:, None] for image, omega in zip(x.numpy(), omegas, strict=True)]
    rate = slow_rate(images, omegas)
    assert 0.1 < rate < 0.95
    torch.manual_seed(5)
    kept = torch.rand(3, 40, dtype=torch.float64).numpy() >= rate
    for row, image, keep in zip(result, images, kept, strict=True):
        expected = upper(np.cov(image * keep[:, None] / (1 - rate), bias=True))
        np.testing.assert_allclose(row, expected, atol=1e-12)


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_in_evaluation_is_the_covariance(spectrum: str) -> None:
    x = SPECTRA[spectrum]()
    pool = DropCov(6).double().eval()
    np.testing.assert_allclose(pool(x), [upper(sigma) for sigma in covariance(x)], atol=1e-12)


@pytest.mark.parametrize(
    "spectrum",
    [pytest.param(name, marks=() if name == "full rank" else pytest.mark.slow) for name in SPECTRA],
)
@pytest.mark.parametrize("training", [False, True])
def test_gradient(spectrum: str, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training uses one fixed mask and a fixed rate, because the derivative treats the rate as a constant."""
    at_rate(monkeypatch, 0.4)
    torch.manual_seed(0)
    pool = DropCov(6).double().train(training)

    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(2)
        return pool(x)

    assert torch.autograd.gradcheck(seeded, SPECTRA[spectrum]().requires_grad_())


@pytest.mark.parametrize("rate", [None, 0.0, 0.5, 1.0])
def test_every_parameter_has_a_gradient(rate: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if rate is not None:
        at_rate(monkeypatch, rate)
    pool = DropCov(6)
    v = pool(torch.randn(4, 6, 9))
    v.square().sum().backward()
    assert v.isfinite().all()
    for parameter in pool.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        assert (parameter.grad != 0).any() == (rate != 1.0)


def test_nothing_survives_a_rate_of_one() -> None:
    assert (dropout_gains(torch.rand(5, 100), torch.tensor(1.0)) == 0).all()


def test_drops_at_the_rate_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    gains = dropout_gains(torch.empty(200, 500), torch.tensor(0.3))
    assert (gains == 0).float().mean().item() == pytest.approx(0.3, abs=4 * (0.21 / 1e5) ** 0.5)
    assert gains.max().item() == pytest.approx(1 / 0.7)


def test_images_without_a_covariance_have_no_say_in_the_rate() -> None:
    torch.manual_seed(0)
    omega, factor = torch.randn(3, 40).softmax(-1), torch.randn(3, 40, 9)
    sigma = factor @ factor.mT
    rate = drop_rate(omega[:2], sigma[:2])
    assert 0 < rate < 1
    for nothing in (0.0, float("nan"), float("inf")):
        sigma[2] = nothing
        torch.testing.assert_close(drop_rate(omega, sigma), rate)
    assert drop_rate(omega[2:], sigma[2:]) == 1
    torch.testing.assert_close(drop_rate(omega[:2], sigma[:2] * 1e36), rate)


def test_random_by_the_generator_of_torch_in_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    at_rate(monkeypatch, 0.5)
    x, pool = torch.randn(2, 30, 9), DropCov(30)
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(pool(x))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    pool.eval()
    state = torch.get_rng_state()
    assert torch.equal(pool(x), pool(x))
    assert torch.equal(torch.get_rng_state(), state)


def test_start_again() -> None:
    pool = DropCov(6)
    before = pool.attention.weight.clone()
    pool.reset_parameters()
    assert not torch.equal(before, pool.attention.weight)


def test_behind_the_layer() -> None:
    pool = CovPool(12, pool="dropcov", dim=6)
    assert pool.out_features == 21
    assert pool(torch.randn(2, 12, 3, 3)).shape == (2, 21)
    assert CovPool(1, pool="dropcov", dim=None)(torch.randn(2, 1, 3, 3)).isfinite().all()


@pytest.mark.parametrize("rate", [None, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_finite_in_training(
    kind: Callable[..., Tensor], rate: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rate is not None:
        at_rate(monkeypatch, rate)
    for exponent in (-12, 0, 12):
        for positions in (9, 4, 1):
            x = (kind(2, 6, positions, torch.Generator().manual_seed(7)) * 10.0**exponent).float()
            for weights in (None, torch.arange(positions).expand(2, -1) % 2 == 0):
                assert all(result.isfinite().all() for result in value_and_gradient(DropCov(6), x, weights))
