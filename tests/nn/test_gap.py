"""Global average pooling as the first-order baseline in the same layer."""

from __future__ import annotations

import pytest
import torch

from covpool.nn import CovPool


def test_is_the_mean_over_positions() -> None:
    x = torch.randn(3, 7, 4, 5)
    pool = CovPool(7, pool="gap", dim=None)
    assert pool.out_features == 7
    torch.testing.assert_close(pool(x), x.mean((2, 3)))


def test_tokens() -> None:
    x = torch.randn(3, 9, 7)
    torch.testing.assert_close(CovPool(7, pool="gap", dim=None)(x), x.mean(1))


def test_half_precision_is_averaged_in_float32() -> None:
    x = (torch.rand(2, 3, 64, 64) + 100).to(torch.bfloat16)
    result = CovPool(3, pool="gap", dim=None)(x)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, x.float().mean((2, 3)))


def test_weights() -> None:
    x, weights = torch.randn(2, 3, 6), torch.rand(2, 6)
    pool = CovPool(3, pool="gap", dim=None, layout="channels_first")
    expected = torch.stack([(x[b] * weights[b]).sum(-1) / weights[b].sum() for b in range(2)])
    torch.testing.assert_close(pool(x, weights=weights), expected)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32])
def test_masked_positions_may_hold_anything(poison: float, mask_dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 6)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]]).to(mask_dtype)
    spoiled = x.masked_fill(mask.unsqueeze(1) == 0, poison).requires_grad_()
    pool = CovPool(3, pool="gap", dim=None, layout="channels_first")
    result = pool(spoiled, weights=mask)
    torch.testing.assert_close(result, torch.stack([x[0, :, :4].mean(-1), x[1, :, :3].mean(-1)]))
    result.sum().backward()
    assert spoiled.grad is not None
    assert spoiled.grad.isfinite().all()


@pytest.mark.parametrize("weighted", [False, True])
def test_gradients(weighted: bool) -> None:
    pool = CovPool(3, pool="gap", dim=None, layout="channels_first")
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(2, 5, dtype=torch.float64, requires_grad=True) if weighted else None
    assert torch.autograd.gradcheck(lambda x: pool(x, weights), x)
    if weighted:
        assert torch.autograd.gradcheck(lambda w: pool(x, w), weights)
