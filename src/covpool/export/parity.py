"""Compare an exported file with the model: agreement and latency."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from covpool.errors import UsageError
from covpool.export.graph import Array, Runner

WARMUP = 3


@dataclass(frozen=True)
class Parity:
    """How far the logits of a file differ from torch's.

    Attributes:
        images: number of images compared.
        agreeing: number of images with the same top-1 class.
        absolute: largest absolute difference of a logit; infinite if a logit of the file is not finite.
        relative: ``absolute`` divided by torch's largest absolute logit.
    """

    images: int
    agreeing: int
    absolute: float
    relative: float

    @property
    def top1(self) -> float:
        """The fraction of images with the same top-1 class."""
        return self.agreeing / self.images


@dataclass(frozen=True)
class Tolerance:
    """The smallest ``Parity.top1`` and the largest ``Parity.relative`` of a file; ``None`` for any."""

    top1: float
    relative: float | None


@dataclass(frozen=True)
class Latency:
    """Milliseconds per call: the median, the 99th percentile, and the number of calls."""

    p50: float
    p99: float
    calls: int


def compare(reference_BK: Array, logits_BK: Array) -> Parity:
    """Compare the logits of a file with torch's, which must be finite."""
    if logits_BK.shape != reference_BK.shape:
        raise UsageError(f"the logits have shape {logits_BK.shape}, torch's have {reference_BK.shape}")
    # In float64, so that the difference is not rounded.
    logits, reference = logits_BK.astype(np.float64), reference_BK.astype(np.float64)
    finite = bool(np.isfinite(logits).all())
    absolute = float(np.abs(logits - reference).max()) if finite else float("inf")
    is_number = ~np.isnan(logits).any(axis=1)
    agreeing = is_number & (np.nan_to_num(logits).argmax(axis=1) == reference.argmax(axis=1))
    largest = float(np.abs(reference).max())
    relative = absolute / largest if largest else (0.0 if absolute == 0 else float("inf"))
    return Parity(len(reference), int(agreeing.sum()), absolute, relative)


def measure_latency(
    runners: Mapping[str, Runner],
    images: Array,
    rounds: int,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Latency]:
    """Time every runner on the same images, in a shuffled order in every round."""
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
    run(images)  # refills the caches that the previous runner used
    start = time.perf_counter()
    run(images)
    return time.perf_counter() - start


def _latency(seconds: list[float]) -> Latency:
    p50, p99 = np.quantile(np.array(seconds) * 1e3, [0.5, 0.99])
    return Latency(float(p50), float(p99), len(seconds))
