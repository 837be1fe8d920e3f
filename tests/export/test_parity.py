from __future__ import annotations

import gc
import math
import time

import numpy as np
import pytest

from covpool.export.graph import Array
from covpool.export.parity import WARMUP, Latency, Parity, _latency, compare, measure_latency
from covpool.export.targets import TARGETS

IMAGES = np.zeros((1, 2, 2, 3), dtype=np.uint8)
REFERENCE = np.array([[1.0, 3.0, -4.0], [2.0, 0.0, 1.0]], dtype=np.float32)


def test_figures_by_hand() -> None:
    found = np.array([[1.0, 3.5, -4.0], [0.5, 0.0, 1.0]], dtype=np.float32)
    parity = compare(REFERENCE, found)
    assert (parity.images, parity.agreeing, parity.top1) == (2, 1, 0.5)
    assert parity.absolute == 1.5
    assert parity.relative == 1.5 / 4


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_no_agreement(value: float) -> None:
    found = REFERENCE.copy()
    found[0, 1] = value
    parity = compare(REFERENCE, found)
    assert parity.absolute == parity.relative == math.inf
    assert parity.agreeing == (2 if value == math.inf else 1)
    assert TARGETS["onnx"].objection(parity) is not None


def test_nothing_but_zeros() -> None:
    zeros = np.zeros((2, 3), dtype=np.float32)
    assert compare(zeros, zeros).relative == 0
    assert compare(zeros, zeros + 1).relative == math.inf


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"logits have shape \(2, 2\), torch's have \(2, 3\)"):
        compare(REFERENCE, REFERENCE[:, :2])


@pytest.mark.parametrize(
    ("name", "agreeing", "relative", "sentence"),
    [
        ("onnx", 1000, 1e-3, None),
        ("onnx", 999, 0.0, "on 999 of 1000 images (99.90 %); float32 requires 100 %"),
        ("onnx", 1000, 2e-3, "differ from torch's by 2.0e-03 of the largest logit; float32 allows 0.001"),
        ("torch", 1000, 1e-3, None),
        ("torch", 999, 0.0, "on 999 of 1000 images (99.90 %); float32 requires 100 %"),
        ("torch", 1000, 2e-3, "differ from torch's by 2.0e-03 of the largest logit; float32 allows 0.001"),
        ("onnx-float16", 990, 0.3, None),
        ("onnx-float16", 989, 0.0, "on 989 of 1000 images (98.90 %); float16 requires 99 %"),
        ("onnx-int8", 970, 0.3, None),
        ("onnx-int8", 969, 0.0, "on 969 of 1000 images (96.90 %); int8 requires 97 %"),
    ],
)
def test_tolerances(name: str, agreeing: int, relative: float, sentence: str | None) -> None:
    found = TARGETS[name].objection(Parity(1000, agreeing, relative, relative))
    if sentence is None:
        assert found is None
    else:
        assert found is not None
        assert sentence in found
        assert TARGETS[name].file in found


def test_every_round_calls_everyone_in_shuffled_order() -> None:
    called: list[str] = []

    def named(name: str) -> object:
        def run(images: Array) -> Array:
            assert images is IMAGES
            assert len(called) < 3 * WARMUP or not gc.isenabled()
            called.append(name)
            return images

        return run

    reports: list[tuple[int, int]] = []
    runners = {name: named(name) for name in "abc"}
    found = measure_latency(runners, IMAGES, 20, progress=lambda *count: reports.append(count))  # type: ignore[arg-type]
    assert gc.isenabled()
    assert reports == [(done, 20) for done in range(1, 21)]
    timed = called[3 * WARMUP :]
    assert timed[::2] == timed[1::2]  # an untimed call comes before each timed one
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
