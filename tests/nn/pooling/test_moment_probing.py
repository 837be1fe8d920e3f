"""Moment Probing against loops in numpy and scipy, and against finite differences."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from math import erf, sqrt

import numpy as np
import pytest
import scipy.signal
import torch
from torch import Tensor

from covpool.nn import CovPool
from covpool.nn.pooling import METHODS
from covpool.nn.pooling.moment_probing import MomentProbing
from tests.nn.pooling.inputs import SPECTRA
from tests.nn.pooling.oracle import Array

small = partial(METHODS["moment_probing"], width=32, heads=4)


def trained(**options: int) -> MomentProbing:
    """Return a pooling whose LayerNorm has an effect."""
    torch.manual_seed(4)
    pool = MomentProbing(6, **options).double()
    torch.nn.init.normal_(pool.norm.weight)
    torch.nn.init.normal_(pool.norm.bias)
    return pool


def convolved(maps: Array, kernels: Array) -> Array:
    """Return every second position of scipy's correlation, summed over the maps."""
    return np.array(
        [
            sum(scipy.signal.correlate2d(m, k, "valid") for m, k in zip(maps, row, strict=True))[::2, ::2]
            for row in kernels
        ]
    )


def slow_heads(pool: MomentProbing, image: Array) -> list[Array]:
    """Return each head as ``(w, n)``, computed position by position."""
    state = {name: value.numpy() for name, value in pool.state_dict().items()}
    columns = []
    for x in image.T:
        heads = np.split(state["projection.weight"] @ x + state["projection.bias"], pool.options.heads)
        normalized = [(head - head.mean()) / np.sqrt(head.var() + 1e-5) for head in heads]
        columns.append([state["norm.weight"] * head + state["norm.bias"] for head in normalized])
    return [np.stack([column[h] for column in columns], axis=1) for h in range(pool.options.heads)]


def slow(pool: MomentProbing, image: Array, position_weights: Array) -> Array:
    heads = slow_heads(pool, image)
    w = position_weights / position_weights.sum()
    matrices = []
    for first, second in pairwise(heads):
        left, right = (head - (head @ w)[:, None] for head in (first, second))
        cross = sum(w[p] * np.outer(left[:, p], right[:, p]) for p in range(len(w)))
        matrices.append(np.stack([column / np.sqrt((column**2).sum()) for column in cross.T], axis=1))
    y = convolved(np.array(matrices), pool.first.weight.detach().numpy())
    y = y * np.vectorize(lambda value: (1 + erf(value / sqrt(2))) / 2)(y)
    return convolved(y, pool.second.weight.detach().numpy()).ravel()


@pytest.mark.parametrize("options", [{"width": 14, "heads": 2}, {"width": 48, "heads": 4}])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_is_the_convolved_cross_covariances(options: dict[str, int], weighted: bool, spectrum: str) -> None:
    x, pool = SPECTRA[spectrum](), trained(**options)
    each = torch.rand(2, x.shape[-1], dtype=torch.float64) if weighted else torch.ones(2, x.shape[-1])
    result = pool(x, each if weighted else None).detach().numpy()
    assert result.shape == (2, pool.out_features)
    for row, image, weights in zip(result, x.numpy(), each.numpy(), strict=True):
        np.testing.assert_allclose(row, slow(pool, image, weights), atol=1e-12)


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_gradient(spectrum: str) -> None:
    pool = trained(width=14, heads=2)
    assert torch.autograd.gradcheck(pool, SPECTRA[spectrum]().requires_grad_())


def test_gradient_of_every_parameter() -> None:
    pool, x = trained(width=14, heads=2), SPECTRA["full rank"]()
    names, parameters = zip(*pool.named_parameters(), strict=True)

    def call(*values: Tensor) -> Tensor:
        return torch.func.functional_call(pool, dict(zip(names, values, strict=True)), x)

    assert torch.autograd.gradcheck(call, parameters)


def test_out_features() -> None:
    assert MomentProbing(6).out_features == 2883
    pool = CovPool(20, pool="moment_probing", dim=None, width=60, heads=3)
    assert pool.out_features == 2 * 4**2
    assert pool(torch.randn(2, 20, 3, 3)).shape == (2, 32)
    assert pool(torch.randn(2, 9, 20)).shape == (2, 32)


def test_start_again() -> None:
    pool = small(6)
    with torch.no_grad():
        for parameter in pool.parameters():
            parameter.fill_(7.0)
    torch.manual_seed(0)
    pool.reset_parameters()
    torch.manual_seed(0)
    fresh = small(6).state_dict()
    for name, value in pool.state_dict().items():
        assert torch.equal(value, fresh[name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 30}, "^width must be a multiple of heads, 7 times it at least; got width=30, heads=4"),
        ({"width": 24}, "^width must be a multiple of heads"),
        ({"heads": 1}, "^heads must be at least 2"),
        ({"width": 0}, "^width must be at least 1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MomentProbing(6, **options)


def test_constant_features_are_zero() -> None:
    """Rounding noise must not become a column of unit length."""
    assert (small(6)(torch.randn(2, 6, 1).expand(-1, -1, 9)) == 0).all()
