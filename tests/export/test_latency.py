from __future__ import annotations

import gc
import time

import numpy as np
import pytest

from covpool.export.graph import Array
from covpool.export.parity import WARMUP, Latency, _latency, measure_latency

IMAGES = np.zeros((1, 2, 2, 3), dtype=np.uint8)


def test_every_round_calls_everyone_in_shuffled_order() -> None:
    called: list[str] = []

    def named(name: str) -> object:
        def run(images: Array) -> Array:
            assert images is IMAGES
            assert len(called) < 3 * WARMUP or not gc.isenabled()
            called.append(name)
            return images

        return run

    told: list[tuple[int, int]] = []
    runners = {name: named(name) for name in "abc"}
    found = measure_latency(runners, IMAGES, 20, progress=lambda *count: told.append(count))  # type: ignore[arg-type]
    assert gc.isenabled()
    assert told == [(done, 20) for done in range(1, 21)]
    timed = called[3 * WARMUP :]
    assert timed[::2] == timed[1::2]  # an untimed call comes before each
    rounds = [tuple(timed[start : start + 6 : 2]) for start in range(0, len(timed), 6)]
    assert len(rounds) == 20
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len(set(rounds)) > 1
    assert [latency.calls for latency in found.values()] == [20, 20, 20]


def test_milliseconds_of_a_call() -> None:
    def sleep(images: Array) -> Array:
        time.sleep(0.02)
        return images

    found = measure_latency({"slow": sleep, "fast": lambda images: images}, IMAGES, 3)
    assert 20 <= found["slow"].p50 <= found["slow"].p99 < 2000
    assert found["fast"].p50 < 20


def test_percentiles_by_hand() -> None:
    seconds = [0.001 * number for number in range(1, 102)]  # 1 to 101 ms
    assert _latency(seconds) == Latency(pytest.approx(51), pytest.approx(100), 101)
