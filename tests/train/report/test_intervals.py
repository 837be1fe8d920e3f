"""Intervals that cover what they promise, and a test that is exact."""

from __future__ import annotations

import math

import numpy as np
import pytest

from covpool.train.report.per_class import PairedDifference, wilson


@pytest.mark.parametrize(("share", "images"), [(0.5, 20), (0.9, 60), (0.98, 300)])
def test_wilson_covers_the_true_share(share: float, images: int) -> None:
    right = np.random.default_rng(0).binomial(images, share, 4000)
    covered = [low <= share <= high for low, high in (wilson(int(r), images) for r in right)]
    assert 0.92 < np.mean(covered) < 0.98


def test_wilson_at_the_ends() -> None:
    assert wilson(0, 10)[0] == 0
    assert wilson(10, 10)[1] == 1
    assert wilson(10, 10)[0] == pytest.approx(0.7225, abs=1e-4)


@pytest.mark.parametrize(
    ("first_only", "second_only", "images"),
    [(0.1, 0.1, 100), (0.2, 0.05, 60), (0.03, 0.01, 615), (0.3, 0.2, 30)],
)
def test_the_interval_of_a_difference_covers_the_true_one(
    first_only: float, second_only: float, images: int
) -> None:
    random = np.random.default_rng(1)
    both = [first_only, second_only, 1 - first_only - second_only]
    covered = []
    for first, second, _ in random.multinomial(images, both, 4000):
        low, high = PairedDifference(images, int(first), int(second)).interval
        covered.append(low <= first_only - second_only <= high)
    assert 0.93 < np.mean(covered) < 0.985


def sign_test(first: int, second: int) -> float:
    """Both tails of a fair coin."""
    tosses = first + second
    tail = sum(math.comb(tosses, k) for k in range(min(first, second) + 1))
    return min(1.0, 2 * tail / 2**tosses)


@pytest.mark.parametrize(("first", "second"), [(0, 5), (3, 3), (10, 2), (125, 66), (900, 1000)])
def test_the_p_value_is_that_of_a_sign_test(first: int, second: int) -> None:
    assert PairedDifference(5000, first, second).p_value == pytest.approx(sign_test(first, second), rel=1e-9)


def test_models_that_agree_differ_by_nothing_but_not_for_certain() -> None:
    same = PairedDifference(50, 0, 0)
    low, high = same.interval
    assert low < 0 < high
    assert (same.difference, same.p_value, same.is_clear) == (0, 1, False)


def test_clear_is_what_test_and_interval_call_so() -> None:
    assert PairedDifference(615, 125, 66).is_clear
    assert PairedDifference(615, 66, 125).is_clear
    assert not PairedDifference(615, 30, 25).is_clear
    assert not PairedDifference(100, 5, 0).is_clear  # 1 in 16
