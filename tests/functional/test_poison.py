"""NaN, Inf and masks: invalid or masked values do not affect the other rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from covpool.functional import inverse_matrix_sqrt, isqrt_cov, matrix_sqrt
from tests.functional.pooling import NORMALIZATIONS, SIDES, Pooling, assert_near
from tests.functional.samples import chosen

sides = pytest.mark.parametrize("side", SIDES)
normalizations = pytest.mark.parametrize("normalization", NORMALIZATIONS)


@sides
@normalizations
@pytest.mark.parametrize("mask", ["bool", "float"])
def test_row_with_everything_masked(side: str, normalization: str, mask: str) -> None:
    """A fully masked row gives zero and zero gradient, whatever it contains. The other row is unaffected."""
    x = torch.randn(2, 4, 5)
    x[0, :, 0], x[0, :, 1] = torch.nan, torch.inf
    weights = torch.tensor([[False] * 5, [True] * 5])
    weights = weights if mask == "bool" else weights.float()
    pooling = Pooling(normalization=normalization, side=side)
    c, grads = pooling.value_and_gradients(x, weights, torch.ones(2, 4, 4))
    assert torch.equal(c[0], torch.zeros(4, 4))
    assert torch.equal(grads[0][0], torch.zeros(4, 5))
    assert all(grad.isfinite().all() for grad in grads)
    alone = isqrt_cov(x[1:], **chosen(pooling.steps), normalization=normalization, side=side)
    assert_near(c[1:], alone.double(), 1e-6)


@sides
@pytest.mark.parametrize("weights_dtype", [torch.bool, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_masked_positions_may_hold_anything(side: str, weights_dtype: torch.dtype, hidden: float) -> None:
    """Masked values affect neither the result nor a gradient. The gradients of their weights are finite."""
    x = torch.randn(2, 4, 5)
    weights = torch.tensor([[1.0, 0, 1, 1, 0], [1, 1, 1, 1, 0]]).to(weights_dtype)
    clean = x.masked_fill((weights == 0).unsqueeze(1), 0.0)
    dirty = x.masked_fill((weights == 0).unsqueeze(1), hidden)
    upstream = torch.randn(2, 4, 4)
    c, grads = Pooling(side=side).value_and_gradients(dirty, weights, upstream)
    expected, expected_grads = Pooling(side=side).value_and_gradients(clean, weights, upstream)
    assert_near(c, expected.double(), 1e-6)
    assert_near(grads[0], expected_grads[0].double(), 1e-5)
    assert all(grad.isfinite().all() for grad in grads)


POISONS: dict[str, Callable[[Tensor], None]] = {
    "one nan": lambda row: row[1, 2].fill_(torch.nan),
    "one inf": lambda row: row[1, 2].fill_(torch.inf),
    "one -inf": lambda row: row[1, 2].fill_(-torch.inf),
    "inf and -inf": lambda row: row[1, :2].copy_(torch.tensor([torch.inf, -torch.inf])),
    "nan channel": lambda row: row[1].fill_(torch.nan),
    "inf channel": lambda row: row[1].fill_(torch.inf),
    "all nan": lambda row: row.fill_(torch.nan),
    "all inf": lambda row: row.fill_(torch.inf),
}


@sides
@normalizations
@pytest.mark.parametrize("backward", ["saved", "recompute"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("poison", POISONS)
def test_poison_stays_in_its_row(
    poison: str, weighted: bool, backward: str, normalization: str, side: str
) -> None:
    """The other images of the batch are bit-identical in value and in gradient."""
    x, upstream = torch.randn(3, 4, 6), torch.randn(3, 4, 4)
    weights = torch.rand(3, 6) + 0.1 if weighted else None
    poisoned = x.clone()
    POISONS[poison](poisoned[1])
    pooling = Pooling(normalization=normalization, side=side, backward=backward)
    c, grads = pooling.value_and_gradients(x, weights, upstream)
    c_poisoned, grads_poisoned = pooling.value_and_gradients(poisoned, weights, upstream)
    others = torch.tensor([0, 2])
    for clean, dirty in zip([c, *grads], [c_poisoned, *grads_poisoned], strict=True):
        assert torch.equal(clean[others], dirty[others])
        assert dirty[others].isfinite().all()
    assert not c_poisoned[1].isfinite().all(), "a broken image must not look like a sound one"


@pytest.mark.parametrize("root", [matrix_sqrt, inverse_matrix_sqrt])
@normalizations
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_poison_stays_in_its_matrix(root: Callable[..., Tensor], normalization: str, poison: float) -> None:
    half = torch.randn(3, 4, 6)
    a = half @ half.mT
    poisoned = a.clone()
    poisoned[1, 2, 2] = poison
    results = []
    for matrix in (a, poisoned):
        leaf = matrix.clone().requires_grad_()
        result = root(leaf, normalization=normalization)
        results.append((result.detach(), torch.autograd.grad(result, leaf, torch.ones_like(leaf))[0]))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean[::2], dirty[::2])
        assert dirty[::2].isfinite().all()
    assert not results[1][0][1].isfinite().all()


@sides
def test_negative_weight_gives_nan_for_its_image_alone(side: str) -> None:
    x, weights = torch.randn(2, 3, 4), torch.ones(2, 4)
    weights[0, 1] = -1.0
    mapped = torch.vmap(lambda one, weight: isqrt_cov(one, weights=weight, side=side))(x, weights)
    for c in (mapped, isqrt_cov(x, weights=weights, side=side)):
        assert c[0].isnan().all()
        assert_near(c[1:], isqrt_cov(x[1:], side=side).double(), 1e-6)
