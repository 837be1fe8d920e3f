from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from lab.bench.timing import Schedule, Spread, interleaved_rounds, time_interleaved


def test_every_round_runs_every_contender_once_in_changing_order() -> None:
    order: list[str] = []

    def sample(name: str) -> float:
        order.append(name)
        return 1.0

    rounds = list(interleaved_rounds(sample, dict.fromkeys("abcd", 20), 20, random.Random(0)))
    assert all(sorted(times) == list("abcd") for times in rounds)
    orders = {tuple(order[start : start + 4]) for start in range(0, 80, 4)}
    assert len(orders) > 5


def test_a_slow_contender_sits_out_evenly() -> None:
    rounds = list(interleaved_rounds(lambda name: 1.0, {"fast": 30, "slow": 7}, 30, random.Random(0)))
    took_part = [index for index, times in enumerate(rounds) if "slow" in times]
    assert len(took_part) == 7
    assert max(later - earlier for earlier, later in pairwise(took_part)) <= 5
    assert all("fast" in times for times in rounds)


def test_ratio_is_taken_within_rounds() -> None:
    """Noise shared by all samples of a round cancels in the ratio."""
    noise = iter(range(1, 100))
    level: dict[str, float] = {"now": 1.0}

    def sample(name: str) -> float:
        return level["now"] * (3.0 if name == "rival" else 1.0)

    rounds = []
    for times in interleaved_rounds(sample, {"ours": 9, "rival": 9}, 9, random.Random(0)):
        rounds.append(times)
        level["now"] = float(next(noise))
    ratios = Spread.of(times["rival"] / times["ours"] for times in rounds)
    assert (ratios.median, ratios.q1, ratios.q3) == (3.0, 3.0, 3.0)


def test_calls_are_as_many_as_the_schedule_says() -> None:
    calls: Counter[str] = Counter()
    runs = {name: (lambda name=name: calls.update([name])) for name in ("ours", "rival")}
    schedule = Schedule(rounds=4, warmup=2, sample_seconds=0.0)
    timings = time_interleaved(runs, reference="ours", schedule=schedule, seed=0)
    # Two warm-up calls, then one untimed and one timed call per round.
    assert calls == {"ours": 10, "rival": 10}
    assert timings["ours"].ratio == Spread(1.0, 1.0, 1.0, 4)
    assert timings["rival"].seconds.count == 4


def test_schedule_gives_slow_contenders_fewer_rounds_and_quick_ones_more_calls() -> None:
    schedule = Schedule(rounds=30, slow_seconds=1.0, slow_rounds=7, sample_seconds=0.02)
    assert schedule.rounds_for(2.0) == 7
    assert schedule.rounds_for(0.5) == 30
    assert Schedule(rounds=3).rounds_for(2.0) == 3
    assert schedule.calls_for(0.002) == 10
    assert schedule.calls_for(0.5) == 1


@pytest.mark.parametrize(
    ("samples", "expected"),
    [([2.0], Spread(2.0, 2.0, 2.0, 1)), ([5.0, 1.0, 2.0, 4.0, 3.0], Spread(3.0, 2.0, 4.0, 5))],
)
def test_spread_is_the_median_and_the_quartiles(samples: list[float], expected: Spread) -> None:
    assert Spread.of(samples) == expected
