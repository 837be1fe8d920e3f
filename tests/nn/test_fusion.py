"""Pooling of several layers: each separately, and all together with their cross-covariances."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from covpool.functional import isqrt_cov
from covpool.nn.fusion import LayersPool
from tests.nn.pooling.oracle import upper

CHANNELS = (3, 5, 4)


def test_each_layer_is_pooled_by_itself() -> None:
    x = torch.randn(2, 12, 4, 5, dtype=torch.float64)
    pool = LayersPool(CHANNELS, "isqrt_cov", dim=None, fusion="each")
    expected = []
    for image in x:
        parts = image.flatten(1).split(CHANNELS)
        expected.append(np.concatenate([upper(isqrt_cov(part).numpy()) for part in parts]))
    assert pool.out_features == 6 + 15 + 10
    np.testing.assert_allclose(pool(x).numpy(), np.stack(expected), atol=1e-12)


def test_all_layers_together_have_cross_covariances() -> None:
    x = torch.randn(2, 12, 4, 5, dtype=torch.float64)
    pool = LayersPool(CHANNELS, "cov", dim=None, fusion="concat")
    expected = [upper(np.cov(image.flatten(1).numpy(), bias=True)) for image in x]
    np.testing.assert_allclose(pool(x).numpy(), np.stack(expected), atol=1e-12)


def test_every_layer_has_its_own_reduction() -> None:
    """A channel of one layer has no effect on the reduced channels of another."""
    torch.manual_seed(0)
    pool = LayersPool(CHANNELS, "cov", dim=7, fusion="concat").eval()
    assert pool.out_features == 7 * 8 // 2
    assert [one.projection.out_channels for one in pool.reduction.each] == [2, 2, 3]
    x = torch.randn(2, 12, 4, 5)
    before = pool.reduction(x)
    x[:, 3:8] = torch.randn(2, 5, 4, 5)  # the second layer
    after = pool.reduction(x)
    changed = (before != after).flatten(2).any(2).any(0)
    assert not changed[:2].any()
    assert changed[2:4].all()
    assert not changed[4:].any()


@pytest.mark.parametrize("fusion", ["each", "concat"])
def test_masks_training_and_reset(fusion: str) -> None:
    torch.manual_seed(0)
    pool = LayersPool(CHANNELS, dim=6, fusion=fusion)
    x, mask = torch.randn(4, 12, 4, 5), torch.rand(4, 4, 5) > 0.3
    dirty = x.masked_fill(~mask.unsqueeze(1), torch.nan)
    y = pool(dirty, mask)
    assert y.shape == (4, pool.out_features)
    y.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in pool.parameters())
    for parameter in pool.parameters():
        nn.init.constant_(parameter, 77.0)
    pool.reset_parameters()
    assert all((parameter != 77.0).any() for parameter in pool.parameters())


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^dim must be at least the number of layers, 3; got 2"):
        LayersPool(CHANNELS, dim=2, fusion="concat")
    with pytest.raises(ValueError, match="fusion"):
        LayersPool(CHANNELS, fusion="sum")
    with pytest.raises(TypeError, match="stepps is not an option"):
        LayersPool(CHANNELS, stepps=3)
