"""Error messages for common mistakes."""

from __future__ import annotations

import pytest
import torch

import covpool
from covpool.nn import CovPool, PostCompensation


def test_dim_given_in_the_place_of_the_method() -> None:
    with pytest.raises(TypeError, match=r"pool must be a name.*got 256.*dim="):
        CovPool(2048, 256)  # type: ignore[arg-type]


@pytest.mark.parametrize("dim", [None, 2])
def test_map_without_positions(dim: int | None) -> None:
    with pytest.raises(ValueError, match="x must have at least one position"):
        CovPool(4, dim=dim)(torch.zeros(2, 4, 0, 3))


def test_a_misspelled_dim() -> None:
    with pytest.raises(TypeError, match=r"dims is not an option.*did you mean 'dim'"):
        CovPool(64, dims=32)


def test_an_image_without_a_batch() -> None:
    with pytest.raises(ValueError, match=r"add a dimension for the batch with x\.unsqueeze\(0\)"):
        CovPool(64, dim=8)(torch.randn(64, 7, 7))


def test_the_layer_is_at_the_top_and_takes_device_and_dtype() -> None:
    layer = covpool.CovPool(8, "mpn_cov", dim=4, device="meta", dtype=torch.float64)
    assert type(layer) is CovPool
    tensors = [*layer.parameters(), *layer.buffers()]
    assert all(tensor.is_meta for tensor in tensors)
    assert all(tensor.dtype == torch.float64 for tensor in tensors if tensor.is_floating_point())


def test_norm_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"t must be \(..., 1, 1\)"):
        PostCompensation()(torch.eye(3).expand(2, 3, 3), torch.ones(2))


def test_more_steps_than_the_precision_can_bear() -> None:
    """The limits of half precision and float64 are checked at creation, that of float32 with the input."""
    for options, most in (({"compute_dtype": torch.bfloat16}, 8), ({}, 40)):
        CovPool(4, dim=None, iteration="paper", steps=most, **options)
        with pytest.raises(ValueError, match=rf"steps must be at most {most} in .*got {most + 1}"):
            CovPool(4, dim=None, iteration="paper", steps=most + 1, **options)
    extra = {"isqrt_cov": {"iteration": "paper"}, "improved_bcnn": {"forward": "newton_schulz"}}
    roots = {"isqrt_cov": 15, "polar_express": 8, "improved_bcnn": 15}
    for method, most in roots.items():
        options = extra.get(method, {})
        assert CovPool(4, method, dim=None, steps=most, **options)(torch.randn(2, 4, 5, 5)).isfinite().all()
        layer = CovPool(4, method, dim=None, steps=most + 1, **options)
        with pytest.raises(ValueError, match=rf"steps must be at most {most} in float32.*got {most + 1}"):
            layer(torch.randn(2, 4, 5, 5))
