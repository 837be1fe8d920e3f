"""How long single calls take, of several runners in one run.

A round calls each of them once, in shuffled order, so that what disturbs the machine disturbs all of them
alike. :mod:`covpool.bench.timing` does the same for medians of means; here every sample is one call, because
the slowest of a hundred is what is asked for.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from covpool.export.running import Array, Runner

WARMUP = 3


@dataclass(frozen=True)
class Latency:
    """Milliseconds of a call: the median, and what 99 of 100 calls do not exceed."""

    p50: float
    p99: float
    calls: int


def measure_latency(
    runners: Mapping[str, Runner],
    images: Array,
    rounds: int,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Latency]:
    """Time every runner on the same images, interleaved."""
    for run in runners.values():
        for _ in range(WARMUP):
            run(images)
    samples: dict[str, list[float]] = {name: [] for name in runners}
    shuffler, names = random.Random(seed), list(runners)
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for done in range(rounds):
            shuffler.shuffle(names)
            for name in names:
                samples[name].append(_seconds(runners[name], images))
            progress(done + 1, rounds)
    finally:
        if was_enabled:
            gc.enable()
    return {name: _latency(seconds) for name, seconds in samples.items()}


def _seconds(run: Runner, images: Array) -> float:
    run(images)  # brings caches back from whichever ran before
    start = time.perf_counter()
    run(images)
    return time.perf_counter() - start


def _latency(seconds: list[float]) -> Latency:
    p50, p99 = np.quantile(np.array(seconds) * 1e3, [0.5, 0.99])
    return Latency(float(p50), float(p99), len(seconds))
