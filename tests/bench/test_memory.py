from __future__ import annotations

import torch
from torch import Tensor

from covpool.bench.contenders.plain import plain_isqrt_cov
from covpool.bench.memory import bytes_kept_for_backward
from covpool.bench.results import Results

FEATURES = torch.randn(2, 16, 9)


def test_a_storage_is_counted_once_and_the_input_not_at_all() -> None:
    def pool(x: Tensor) -> Tensor:
        doubled = 2 * x
        return doubled.bmm(doubled.mT).bmm(doubled)

    features, first_product = 2 * 16 * 9, 2 * 16 * 16
    assert bytes_kept_for_backward(pool, FEATURES) == 4 * (features + first_product)
    assert bytes_kept_for_backward(lambda x: x * x, FEATURES) == 0


def test_nothing_is_kept_without_grad() -> None:
    assert bytes_kept_for_backward(torch.no_grad()(plain_isqrt_cov), FEATURES) == 0


def test_plain_keeps_its_iterates_and_the_centring_matrix() -> None:
    # Sigma, A, five Y and four Z of C×C; the n×n centring matrix; the trace.
    assert bytes_kept_for_backward(plain_isqrt_cov, FEATURES) == 2 * 4 * (11 * 16 * 16 + 9 * 9 + 1)


def test_recompute_keeps_less_than_saved_and_saved_less_than_plain(results: Results) -> None:
    for size in results["sizes"].values():
        kept = {name: found["bytes_kept_per_image"] for name, found in size["contenders"].items()}
        assert kept["recompute"] < kept["ours"] < kept["plain"]
        assert kept["bare"] is None
