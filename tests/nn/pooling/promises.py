"""What every method promises of features that break the usual code, each as one check."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from covpool.nn.pooling import Method
from tests.functional.degenerate import KINDS

Make = Callable[[int], Method]
POISONS = [float("nan"), float("inf"), 1e38]
degenerate = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
poisons = pytest.mark.parametrize("poison", POISONS)


def value_and_gradient(pool: Method, x: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The vectors, and the gradient of a sum of their entries with weights of all signs."""
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(3)  # for a method that draws: two calls draw the same
    v = pool(x, weights)
    upstream = torch.linspace(-1, 1, v.shape[-1], dtype=v.dtype) + 0.3
    (v * upstream).sum().backward()
    assert x.grad is not None
    return v.detach(), x.grad


def check_finite_at_every_scale(make: Make, kind: Callable[..., Tensor]) -> None:
    generator = torch.Generator().manual_seed(7)
    for exponent in (-12, -6, 0, 6, 12):
        for batch, channels, positions in [(2, 6, 9), (2, 6, 4), (1, 6, 1)]:
            x = (kind(batch, channels, positions, generator) * 10.0**exponent).float()
            weights = torch.rand(batch, positions, generator=generator)
            for w in (None, weights, weights > 0.5, torch.zeros_like(weights)):
                v, gradient = value_and_gradient(make(channels), x, w)
                assert v.isfinite().all(), (exponent, positions, w)
                assert gradient.isfinite().all(), (exponent, positions, w)


def check_hidden_positions_have_no_say(make: Make, poison: float) -> None:
    """A mask, and weights with zeros, against the kept positions alone."""
    torch.manual_seed(0)
    x = torch.randn(2, 6, 9)
    kept, pool = [0, 2, 3, 7, 8], make(6)
    expected, wanted = value_and_gradient(pool, x[:, :, kept])
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[:, kept] = True
    spoiled = x.masked_fill(~mask.unsqueeze(1), poison)
    for weights in (mask, mask.float() * 2.5):
        v, gradient = value_and_gradient(pool, spoiled, weights)
        torch.testing.assert_close(v, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradient[:, :, kept], wanted, rtol=1e-3, atol=1e-4)
        assert (gradient[:, :, [1, 4, 5, 6]] == 0).all()


def check_a_nan_image_disturbs_no_other(make: Make) -> None:
    torch.manual_seed(0)
    x, pool = torch.randn(3, 6, 9), make(6).eval()
    clean, wanted = value_and_gradient(pool, x)
    x[1, 2, 3] = torch.nan
    v, gradient = value_and_gradient(pool, x)
    torch.testing.assert_close(v[[0, 2]], clean[[0, 2]])
    torch.testing.assert_close(gradient[[0, 2]], wanted[[0, 2]])
    assert v[1].isnan().any()


def check_half_precision_gives_float32(make: Make) -> None:
    """Half inputs, a half layer, and autocast around a layer that is not."""
    torch.manual_seed(0)
    x, pool = torch.randn(2, 6, 9), make(6).eval()
    half = x.to(torch.bfloat16)
    expected = pool(half.float())
    torch.testing.assert_close(pool(half), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(pool(x), pool(x.double()).float(), rtol=1e-3, atol=1e-4)
    cast = copy.deepcopy(pool).to(torch.bfloat16)
    v = cast(half)
    assert v.dtype == torch.float32
    torch.testing.assert_close(v, expected, rtol=0.05, atol=0.05)
    v.sum().backward() if v.requires_grad else None


def check_copies_are_the_same(make: Make, other: Make) -> None:
    """A deep copy, and a layer made otherwise that loads the state."""
    torch.manual_seed(0)
    x, pool = torch.randn(2, 6, 9), make(6).eval()
    loaded = other(6).eval()
    loaded.load_state_dict(pool.state_dict())
    torch.testing.assert_close(copy.deepcopy(pool)(x), pool(x), rtol=0, atol=0)
    torch.testing.assert_close(loaded(x), pool(x), rtol=0, atol=0)
