"""The documented cost of each method: matrix products forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from covpool.nn.pooling import METHODS
from tests.functional.counting import count_value_and_gradient

# With more positions than channels. The covariance or second moment takes 1 product forward and 2 backward.
COSTS: list[tuple[str, dict[str, Any], int, int]] = [
    ("gap", {}, 0, 0),
    ("cov", {}, 1, 2),
    ("isqrt_cov", {"iteration": "paper"}, 1 + 12, 1 + 16),  # uses that the gradient of Σ is symmetric
    ("isqrt_cov", {"iteration": "fitted", "steps": 3}, 1 + 6, 1 + 8),
    ("mpn_cov", {}, 1 + 1, 2 + 4),
    ("bcnn", {}, 1, 2),
    ("improved_bcnn", {}, 1 + 1, 2 + 4),
    ("improved_bcnn", {"forward": "newton_schulz"}, 1 + 27, 2 + 4),
    ("improved_bcnn", {"forward": "newton_schulz", "backward": "svd"}, 1 + 27, 2 + 4),
    ("improved_bcnn", {"forward": "newton_schulz", "backward": "lyapunov_iteration"}, 1 + 27, 2 + 52),
    ("deep_o2p", {}, 1 + 1, 2 + 4),
    ("g2denet", {}, 1 + 1, 2 + 4),
    ("g2denet", {"root": "newton_schulz"}, 1 + 6, 2 + 8),
    ("cbp", {}, 1, 2),
    ("mpa_lya", {}, 1 + 4, 2 + 42),
    ("mtp_lya", {}, 1 + 11, 2 + 42),
    ("svd_pade", {}, 1 + 1, 2 + 4),
    ("svd_taylor", {}, 1 + 1, 2 + 4),
    ("polar_express", {}, 1 + 17, 2 + 34),
    ("dropcov", {}, 1, 2),
    ("power_tmlr", {}, 1 + 1, 2 + 4),
    ("correlation", {}, 1 + 6, 2 + 8),
    ("isice", {}, 1 + 95, 2 + 130),
]


@pytest.mark.parametrize(("method", "options", "forward", "backward"), COSTS, ids=lambda value: str(value))
def test_products(method: str, options: dict[str, Any], forward: int, backward: int) -> None:
    pool = METHODS[method](6, **options)
    value, gradient = count_value_and_gradient(pool, torch.randn(2, 6, 20))
    assert (value.count, gradient.count) == (forward, backward)


def test_every_method_is_counted_or_has_other_operations() -> None:
    counted = {method for method, *_ in COSTS}
    # Exceptions: a QR decomposition, a method of mostly convolutions, and first-order methods.
    others = {"abmilp", "attentive", "efficient_probing", "gem", "simpool"}
    assert set(METHODS) - counted == {"cholesky", "moment_probing"} | others
