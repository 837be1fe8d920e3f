"""Covariances of parts combine to the covariance of the whole."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from covpool.errors import UsageError
from covpool.functional import (
    Moments,
    StreamingCovariance,
    covariance,
    covariance_merge,
    isqrt_cov,
    matrix_sqrt,
    moments,
)
from tests.functional.tolerances import assert_close

DTYPES = [torch.float64, torch.float32]
SIZES = (1, 5, 2, 8)
# All kinds of weights, for 16 positions.
WEIGHTS = {
    "none": lambda: None,
    "mask": lambda: torch.rand(2, 16) > 0.4,
    "numbers": lambda: torch.rand(2, 16).double() * 10,
    "a part without weight": lambda: torch.cat([torch.rand(2, 6), torch.zeros(2, 2), torch.rand(2, 8)], 1),
    "no weight at all": lambda: torch.zeros(2, 16),
}


def split(x: Tensor, weights: Tensor | None) -> list[Moments]:
    masks = [None] * len(SIZES) if weights is None else weights.split(SIZES, dim=-1)
    return [moments(part, weights=mask) for part, mask in zip(x.split(SIZES, dim=-1), masks, strict=True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_any_order_equals_the_whole(kind: str, dtype: torch.dtype) -> None:
    x, weights = torch.randn(2, 4, 16, dtype=dtype) + 3, WEIGHTS[kind]()
    expected = covariance(x, weights=weights)
    parts = split(x, weights)
    results = [covariance_merge(order).covariance() for order in itertools.permutations(parts)]
    for result in results:
        assert_close(result.to(dtype), expected)
        # Different orders agree to float64 rounding, whatever the dtype of the features.
        assert_close(result, results[0], 1e-13)


def test_a_tree_of_merges_equals_a_row() -> None:
    a, b, c, d = split(torch.randn(2, 4, 16), None)
    tree = covariance_merge([covariance_merge([a, b]), covariance_merge([c, d])])
    for one, other in zip(tree, covariance_merge([a, b, c, d]), strict=True):
        assert_close(one, other, 1e-13)


def test_mean_and_weight_are_those_of_numpy() -> None:
    x, weights = torch.randn(3, 16, dtype=torch.float64), torch.rand(16, dtype=torch.float64)
    merged = covariance_merge(split(x[None].expand(2, -1, -1), weights[None].expand(2, -1)))
    assert merged.weight[0].item() == pytest.approx(weights.sum().item())
    assert merged.mean[0].numpy() == pytest.approx(np.average(x.numpy(), axis=1, weights=weights.numpy()))


def test_a_part_counts_by_its_weight() -> None:
    """Weights are not divided by their sum: a part with twice the weight counts twice."""
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    doubled = covariance_merge([moments(a), moments(b, weights=torch.full((4,), 2.0))]).covariance()
    assert_close(doubled.float(), covariance(torch.cat([a, b, b], dim=-1)))


@pytest.mark.parametrize("weighted", [False, True])
def test_a_large_offset_costs_no_digits(weighted: bool) -> None:
    """Sums of squares would lose all digits: their error is 1e16 times eps, and the variance is about 1."""
    x = torch.randn(1, 3, 4096, dtype=torch.float64)
    weights = torch.ones(1, 512, dtype=torch.float64) if weighted else None
    parts = [moments(part + 1e8, weights=weights) for part in x.split(512, dim=-1)]
    assert_close(covariance_merge(parts).covariance(), covariance(x), 1e-7)


@pytest.mark.parametrize("kind", ["none", "numbers"])
def test_a_constant_channel_stays_exactly_constant(kind: str) -> None:
    x = torch.randn(2, 3, 16)
    x[:, 1] = 1234.567
    merged = covariance_merge(split(x, WEIGHTS[kind]())).covariance()
    assert not merged[:, 1].any()
    assert merged[:, 0, 0].all()


def test_hidden_positions_may_hold_anything() -> None:
    x, mask = torch.randn(2, 4, 16), torch.rand(2, 16) > 0.4
    expected = covariance_merge(split(x, mask))
    poisoned = x.masked_fill(~mask[:, None], torch.nan)
    for one, other in zip(covariance_merge(split(poisoned, mask)), expected, strict=True):
        assert torch.equal(one, other)


def test_derivatives() -> None:
    def merged(x: Tensor, weights: Tensor) -> Tensor:
        parts = (moments(x[..., part], weights=weights[..., part]) for part in (slice(3), slice(3, 5)))
        return covariance_merge(parts).covariance()

    x = torch.randn(2, 2, 5, dtype=torch.float64, requires_grad=True)
    weights = (torch.rand(2, 5, dtype=torch.float64) + 0.1).requires_grad_()
    assert gradcheck(merged, (x, weights), check_forward_ad=True)
    assert gradgradcheck(merged, (x, weights))


def test_a_stream_with_one_root_equals_isqrt_cov_at_once() -> None:
    x, weights = torch.randn(2, 8, 300), torch.rand(2, 300)
    stream = StreamingCovariance()
    for part, of_part in zip(x.split(64, dim=-1), weights.split(64, dim=-1), strict=True):
        stream.update(part, weights=of_part)
    assert_close(matrix_sqrt(stream.result()), isqrt_cov(x, weights=weights))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_stream_has_the_dtype_of_the_operator(dtype: torch.dtype) -> None:
    x, stream = torch.randn(3, 6).to(dtype), StreamingCovariance()
    stream.update(x)
    assert stream.result().dtype == covariance(x).dtype
    assert_close(stream.result(), covariance(x))


@pytest.mark.slow
def test_ten_thousand_parts_are_as_exact_as_one() -> None:
    x, stream = torch.randn(2, 40_000) + 100, StreamingCovariance()
    for part in x.split(4, dim=-1):
        stream.update(part)
    assert stream.moments.weight.item() == 40_000
    assert_close(stream.result(), covariance(x.double()).float(), 1e-6)


def test_mistakes() -> None:
    with pytest.raises(UsageError, match="at least one part"):
        covariance_merge([])
    with pytest.raises(UsageError, match=r"same batch and channels.*\(2,\) and \(3,\)"):
        covariance_merge([moments(torch.randn(2, 5)), moments(torch.randn(3, 5))])
    with pytest.raises(UsageError, match="call update"):
        StreamingCovariance().result()


def _rank(rank: int, x: Tensor, store: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    own = moments(x[..., :3] if rank == 0 else x[..., 3:])
    gathered = []
    for tensor in own:
        both = [torch.empty_like(tensor) for _ in range(2)]
        torch.distributed.all_gather(both, tensor)
        gathered.append(both)
    merged = covariance_merge(zip(*gathered, strict=True)).covariance().float()
    assert_close(merged, covariance(x))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_share_their_parts(tmp_path: Path) -> None:
    mp.spawn(_rank, (torch.randn(2, 4, 16), str(tmp_path / "store")), nprocs=2)
