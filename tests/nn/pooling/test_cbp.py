"""Compact bilinear pooling: its sketches against explicit sums, and the kernel that they approximate."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from covpool.nn import CovPool
from covpool.nn.pooling import METHODS
from covpool.nn.pooling.cbp import Cbp
from tests.nn.pooling.inputs import SPECTRA, full_rank
from tests.nn.pooling.oracle import Array, check_gradient, pooled

make = METHODS["cbp"]
PROJECTIONS = ["tensor_sketch", "random_maclaurin"]
projections = pytest.mark.parametrize("projection", PROJECTIONS)


def count_sketch(x: Array, bins: Array, signs: Array, features: int) -> Array:
    sketch = np.zeros(features)
    for channel, value in enumerate(x):
        sketch[bins[channel]] += signs[channel] * value
    return sketch


def convolved(a: Array, b: Array) -> Array:
    size = len(a)
    return np.array([sum(a[i] * b[(j - i) % size] for i in range(size)) for j in range(size)])


def slow_sketch(pool: Cbp, image: Array, position_weights: Array) -> Array:
    """Compute the sketch position by position, as the paper writes it."""
    signs = pool.signs.numpy().astype(np.float64)
    total = np.zeros(pool.out_features)
    for x, weight in zip(image.T, position_weights, strict=True):
        if pool.options.projection == "tensor_sketch":
            halves = [count_sketch(x, pool.bins[i].numpy(), signs[i], pool.out_features) for i in (0, 1)]
            total += weight * convolved(*halves)
        else:
            total += weight * (signs[0] @ x) * (signs[1] @ x) / pool.out_features**0.5
    return total / position_weights.sum()


@projections
@pytest.mark.parametrize("features", [1, 11, 50])
@pytest.mark.parametrize("weighted", [False, True])
def test_is_the_sum_of_convolutions_over_positions(projection: str, features: int, weighted: bool) -> None:
    x = full_rank()
    pool = Cbp(6, projection=projection, features=features)
    weights = torch.rand(2, 12, dtype=torch.float64) if weighted else None
    result = pool(x, weights).numpy()
    each = np.ones((2, 12)) if weights is None else weights.numpy()
    for row, image, image_weights in zip(result, x.numpy(), each, strict=True):
        phi = slow_sketch(pool, image, image_weights)
        root = np.sign(phi) * np.abs(phi) ** 0.5
        np.testing.assert_allclose(row, root / np.sqrt((root**2).sum()), atol=1e-12)


def kernel_estimates(projection: str, x: Tensor, y: Tensor, features: int, seeds: range) -> Array:
    estimates = []
    for seed in seeds:
        pool = Cbp(x.shape[1], projection=projection, features=features, seed=seed)
        estimates.append((pool.sketch(x) * pool.sketch(y)).sum().item())
    return np.array(estimates)


@projections
def test_approximates_the_kernel_of_the_second_moment(projection: str) -> None:
    """The estimate is unbiased over the seeds, and its variance falls as 1/features."""
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(2, 1, 12, 7, generator=generator, dtype=torch.float64) + 0.5
    pairs = [(p, q) for p in x[0].numpy().T for q in y[0].numpy().T]
    kernel = np.mean([sum(a * b for a, b in zip(p, q, strict=True)) ** 2 for p, q in pairs])
    variances = []
    for features in (16, 128):
        estimates = kernel_estimates(projection, x, y, features, range(1000))
        standard_error = estimates.std() / len(estimates) ** 0.5
        assert abs(estimates.mean() - kernel) < 4 * standard_error
        variances.append(estimates.var())
    assert variances[0] / variances[1] == pytest.approx(8, rel=0.25)


@projections
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_gradient(projection: str, spectrum: str) -> None:
    check_gradient("cbp", SPECTRA[spectrum](), projection=projection, features=40)


def test_bins_into_which_nothing_falls_are_zero() -> None:
    v = pooled("cbp", full_rank().float(), features=8192)
    assert (np.count_nonzero(v, axis=1) <= 36).all()


def test_the_seed_makes_the_sketch_and_leaves_the_global_generator() -> None:
    state = torch.get_rng_state()
    first, same, other = Cbp(6), Cbp(6, seed=0), Cbp(6, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.bins, same.bins)
    assert torch.equal(first.signs, same.signs)
    assert not torch.equal(first.bins, other.bins)
    first.reset_parameters()
    assert torch.equal(first.bins, same.bins)
    assert torch.equal(first.signs, same.signs)


@projections
def test_loads_with_its_own_sketch_whatever_the_seed(projection: str) -> None:
    x = torch.randn(2, 6, 9)
    saved = make(6, projection=projection, features=50, seed=1)
    loaded = make(6, projection=projection, features=50, seed=2)
    assert not torch.equal(loaded(x), saved(x))
    loaded.load_state_dict(saved.state_dict())
    assert torch.equal(loaded(x), saved(x))


@projections
def test_without_memory_on_the_meta_device(projection: str) -> None:
    with torch.device("meta"):
        pool = Cbp(6, projection=projection, features=10**12)
        assert all(buffer.is_meta for buffer in pool.buffers())
    pool = Cbp(6, projection=projection, features=30).to("meta")
    assert pool(torch.empty(2, 6, 5, device="meta")).shape == (2, 30)


def test_behind_the_layer() -> None:
    pool = CovPool(12, pool="cbp", dim=6, features=100)
    assert pool.out_features == 100
    assert pool(torch.randn(2, 12, 3, 3)).shape == (2, 100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"projection": "fft"}, "^projection must be one of 'tensor_sketch', 'random_maclaurin'"),
        ({"features": 0}, "^features must be at least 1"),
        ({"seed": -1}, "^seed must be at least 0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cbp(6, **options)
