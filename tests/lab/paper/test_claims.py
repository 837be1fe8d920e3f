from __future__ import annotations

from typing import Any

import pytest

from lab.paper.claims import (
    Claim,
    errors,
    fails_to_learn,
    less_time,
    lower_error,
    pooled_spread,
    same_time,
)


def results(**rows: list[float]) -> dict[str, Any]:
    runs = [
        {"label": label, "failed": None, "epochs": [{"top1_error": 90.0}, {"top1_error": value}]}
        for label, values in rows.items()
        for value in values
    ]
    return {"runs": runs, "times": {}, "arguments": {"scale": {"classes": 25}}}


def verdict(claim: Claim, found: dict[str, Any]) -> str:
    return claim.judge(found).verdict


def test_a_clear_difference_of_the_same_size() -> None:
    found = results(a=[40.0, 41.0, 42.0], b=[43.0, 44.0, 45.0])
    assert verdict(lower_error("", "a", "b", 3.0), found) == "agrees"
    assert lower_error("", "a", "b", 3.0).judge(found).ours == "3.0 ± 0.8 points lower"
    assert verdict(lower_error("", "a", "b"), found) == "agrees"


def test_a_clear_difference_of_another_size() -> None:
    found = results(a=[40.0, 41.0, 42.0], b=[53.0, 54.0, 55.0])
    assert verdict(lower_error("", "a", "b", 1.0), found) == "agrees in sign"


def test_the_other_sign() -> None:
    found = results(a=[40.0, 41.0, 42.0], b=[43.0, 44.0, 45.0])
    assert verdict(lower_error("", "b", "a", 1.0), found) == "does not agree"


def test_less_than_seeds_make_of_it() -> None:
    found = results(a=[40.0, 41.0, 42.0], b=[41.0, 42.0, 43.0])
    assert verdict(lower_error("", "a", "b", 1.0), found) == "not resolved here"


def test_one_seed_resolves_nothing() -> None:
    found = results(a=[40.0], b=[60.0], c=[1.0, 2.0])
    assert lower_error("", "a", "b").judge(found).ours == "20.0 points lower, one seed"
    assert verdict(lower_error("", "a", "b"), found) == "not resolved here"


def test_what_is_missing_was_not_run() -> None:
    assert verdict(lower_error("", "a", "z"), results(a=[40.0])) == "not run here"
    assert verdict(less_time("", "a", "z", 2.0), results(a=[40.0])) == "not run here"


def test_spread_is_pooled_over_rows() -> None:
    spread, freedom = pooled_spread(results(a=[1.0, 3.0], b=[10.0, 10.0, 10.0], c=[5.0]))
    assert freedom == 3
    assert spread == pytest.approx((2 / 3) ** 0.5)


def test_half_of_the_epochs() -> None:
    found = results(a=[40.0], b=[50.0])
    assert errors(found, "a", 0.5) == [90.0]
    assert errors(found, "a", 0.51) == errors(found, "a") == [40.0]


def test_a_failed_run_guesses() -> None:
    found = results(a=[40.0])
    found["runs"][0] |= {"failed": "the loss was not finite", "epochs": []}
    assert errors(found, "a") == [96.0]


def test_nothing_is_said_of_a_row_of_which_some_failed() -> None:
    found = results(a=[50.0, 51.0, 50.5], b=[49.0, 49.2, 40.0])
    found["runs"][-1] |= {"failed": "the loss was not finite", "epochs": []}
    finding = lower_error("", "a", "b").judge(found)
    assert (finding.ours, finding.verdict) == ("1 of 3 seeds of b failed", "not resolved here")
    for run in found["runs"][3:]:
        run |= {"failed": "the loss was not finite", "epochs": []}
    assert verdict(lower_error("", "a", "b"), found) == "agrees"


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([96.0, 92.0], "agrees"),
        ([96.0, 76.0], "not resolved here"),
        ([77.0, 76.0], "does not agree"),
        ([76.0], "not resolved here"),
        ([], "not run here"),
    ],
)
def test_whether_it_learns(errors: list[float], expected: str) -> None:
    assert verdict(fails_to_learn("", "a", "fails to converge"), results(a=errors)) == expected


@pytest.mark.parametrize(
    ("ratio", "paper", "expected"),
    [
        ((1.8, 1.9, 2.0), 1.9, "agrees"),
        ((1.8, 1.9, 2.0), 5.0, "agrees in sign"),
        ((0.5, 0.6, 0.7), 5.0, "does not agree"),
        ((0.9, 1.1, 1.2), 5.0, "agrees in sign"),
        ((0.8, 1.1, 1.3), 5.0, "not resolved here"),
        ((0.9, 1.0, 1.1), 5.0, "equal here"),
    ],
)
def test_times(ratio: tuple[float, float, float], paper: float, expected: str) -> None:
    assert verdict(less_time("", "a", "b", paper), with_times(ratio)) == expected


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        ((0.98, 1.0, 1.02), "agrees"),
        ((1.9, 2.0, 2.1), "does not agree"),
        ((0.97, 0.98, 0.99), "agrees"),
        ((0.5, 1.0, 1.5), "not resolved here"),
    ],
)
def test_the_same_time(ratio: tuple[float, float, float], expected: str) -> None:
    assert verdict(same_time("", "a", "b", 1.004), with_times(ratio)) == expected


def with_times(ratio: tuple[float, float, float]) -> dict[str, Any]:
    found = results(a=[40.0], b=[40.0])
    one = {"both": {"ratio": {"q1": 1.0, "median": 1.0, "q3": 1.0}, "rounds": 30}}
    other = {"both": {"ratio": dict(zip(("q1", "median", "q3"), ratio, strict=True)), "rounds": 30}}
    return found | {"times": {"a": one, "b": other}}


def test_rows_that_did_not_learn_do_not_count_in_the_spread() -> None:
    healthy = results(a=[40.0, 41.0, 42.0], b=[43.0, 44.0, 45.0])
    spoilt = results(a=[40.0, 41.0, 42.0], b=[43.0, 44.0, 45.0], c=[96.0, 96.0, 96.0], d=[50.0, 96.0, 95.0])
    assert pooled_spread(spoilt) == pooled_spread(healthy)
