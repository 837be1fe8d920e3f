"""Weights of positions: their meaning, and their derivative at zero."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from covpool.functional import isqrt_cov
from tests.functional.pooling import Pooling, assert_sound
from tests.functional.samples import features, positive_weights
from tests.functional.tolerances import assert_close

sides = pytest.mark.parametrize("side", ["channels", "positions"])


@sides
@pytest.mark.parametrize("value", [1.0, 0.2, 1e-3, 300.0])
def test_uniform_weights_are_no_weights(side: str, value: float) -> None:
    """Weights are divided by their sum, so their scale does not matter."""
    x = features(2, 4, 5).requires_grad_()
    upstream = torch.randn(2, 4, 4, dtype=torch.float64)
    without = isqrt_cov(x, side=side)
    uniform = isqrt_cov(x, weights=torch.full((2, 5), value, dtype=torch.float64), side=side)
    assert_close(uniform.detach(), without.detach())
    (expected,) = torch.autograd.grad(without, x, upstream)
    (actual,) = torch.autograd.grad(uniform, x, upstream)
    assert_close(actual, expected)


@sides
def test_whole_weights_are_repeated_positions(side: str) -> None:
    x, counts = features(4, 3), torch.tensor([1, 3, 2])
    repeated = isqrt_cov(x.repeat_interleave(counts, dim=-1), side=side)
    assert_close(isqrt_cov(x, weights=counts.double(), side=side), repeated)


@sides
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_mask_drops_positions(side: str, kind: str) -> None:
    """Masked positions count as absent. Their gradient is zero, and they may contain anything."""
    mask = torch.tensor([True, False, True, True, False])
    x = features(4, 5)
    leaf = x.clone()
    leaf[:, 1], leaf[:, 4] = torch.nan, torch.inf
    leaf.requires_grad_()
    kept = x[:, mask].requires_grad_()
    upstream = torch.randn(4, 4, dtype=torch.float64)
    masked = isqrt_cov(leaf, weights=mask if kind == "bool" else mask.double(), side=side)
    dropped = isqrt_cov(kept, side=side)
    assert_close(masked.detach(), dropped.detach())
    (grad,) = torch.autograd.grad(masked, leaf, upstream)
    (expected,) = torch.autograd.grad(dropped, kept, upstream)
    assert_close(grad[:, mask], expected)
    assert torch.equal(grad[:, ~mask], torch.zeros(4, 2, dtype=torch.float64))


@sides
@pytest.mark.parametrize("normalization", ["trace", "frobenius"])
@pytest.mark.parametrize("compensation", ["matched", "none"])
@pytest.mark.parametrize("flat_elsewhere", [False, True])
def test_gradient_of_a_weight_at_zero(
    side: str, normalization: str, compensation: str, flat_elsewhere: bool
) -> None:
    """The result has a one-sided derivative at a zero weight, although the internal square root has none.

    This includes channels that vary only at positions of zero weight.
    """
    x, weights = features(1, 4, 5), positive_weights(1, 5)
    weights[0, 2] = 0.0
    if flat_elsewhere:
        x[0, 1] = torch.tensor([1.0, 1.0, 3.0, 1.0, 1.0])
    upstream = torch.randn(1, 4, 4, dtype=torch.float64)
    options = {"normalization": normalization, "compensation": compensation, "side": side}

    def f(weights: Tensor) -> Tensor:
        return (isqrt_cov(x, weights=weights, **options) * upstream).sum()

    step = torch.zeros_like(weights)
    step[0, 2] = 1e-5
    # Forward differences, extrapolated twice: the error is of third order in the step.
    first, second, third = ((f(weights + step / k) - f(weights)) * k / 1e-5 for k in (1, 2, 4))
    expected = (8 * third - 6 * second + first) / 3
    leaf = weights.clone().requires_grad_()
    (grad,) = torch.autograd.grad(f(leaf), leaf)
    assert_close(grad[0, 2], expected, 1e-6)
    assert abs(expected) > 1e-3, "a zero would prove nothing"

    small = weights.float().requires_grad_()
    result = isqrt_cov(x.float(), weights=small, **options)
    (grad32,) = torch.autograd.grad(result, small, upstream.float())
    assert grad32.isfinite().all()
    assert_close(grad32, grad.float(), 1e-3)


def test_weights_whose_sum_overflows() -> None:
    x = torch.randn(1, 3, 4)
    assert_close(isqrt_cov(x, weights=torch.full((1, 4), 2e38)), isqrt_cov(x))


@sides
def test_an_outlier_of_hardly_any_weight_costs_no_digits(side: str) -> None:
    x = torch.randn(1, 4, 5)
    x[..., 0] = -1e6
    weights = torch.tensor([[1e-20, 1.0, 0.5, 2.0, 1.0]])
    actual = isqrt_cov(x, weights=weights, side=side).double()
    expected = isqrt_cov(x.double(), weights=weights.double(), side=side)
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@sides
@pytest.mark.parametrize("steps", [1, 5])
def test_rounding_of_a_flat_channel_stays_out_of_zero_weights(side: str, steps: int) -> None:
    """Four rounding units of 60000 are noise, but they are 70000 times the spread of the other channel."""
    x = torch.tensor(
        [
            [
                0.3333336412906647,
                0.33333370089530945,
                0.33333349227905273,
                0.3333337604999542,
                0.333333373069763,
            ],
            [60000.0, 60000.04296875, 60000.0625, 60000.015625, 60000.02734375],
        ]
    )
    weights = torch.tensor([0.0, 0.6496819257736206, 0.0, 0.8400298953056335, 0.05443114787340164])
    assert_sound(Pooling(steps=steps, side=side), x[None], weights[None])


@sides
@pytest.mark.parametrize("magnitude", [1.0, 6e4, 1e12])
def test_zero_weights_are_a_mask_beside_a_flat_channel(side: str, magnitude: float) -> None:
    """Zero weights and a mask give the same result, gradient and tangent, at any magnitude."""
    units = torch.tensor([0.0, 3.0, 3.0, 0.0])
    x = torch.stack([torch.tensor([1.0, 2.0, 4.0, 3.0]) * 1e-12, magnitude * (1 + units * 2.0**-23)])
    mask = torch.tensor([True, True, True, False])
    tangent = torch.randn(2, 4)
    results = []
    for weights in (mask.float(), mask):
        c, dc = torch.func.jvp(
            lambda x, weights=weights: isqrt_cov(x, weights=weights, side=side), (x,), (tangent,)
        )
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(isqrt_cov(leaf, weights=weights, side=side).sum(), leaf)
        assert torch.equal(grad[1, mask], torch.zeros(3))
        results.append((c, dc, grad))
    for numbers, masked in zip(*results, strict=True):
        assert_close(numbers, masked)
