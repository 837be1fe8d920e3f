"""Compare an exported file with the model: agreement, verdict, latency."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from covpool.errors import UsageError
from covpool.export.graph import Array, Runner


@dataclass(frozen=True)
class Parity:
    """Two sets of logits beside each other.

    Attributes:
        images: how many were compared.
        agreeing: of how many both have the same class first.
        absolute: the largest difference of a logit; infinite where one is not a number.
        relative: the same, as a part of torch's largest logit.
    """

    images: int
    agreeing: int
    absolute: float
    relative: float

    @property
    def top1(self) -> float:
        """The part of the images on which the first class is the same."""
        return self.agreeing / self.images


def compare(reference_BK: Array, found_BK: Array) -> Parity:
    """Compare a file's logits with torch's, which are finite."""
    if found_BK.shape != reference_BK.shape:
        raise UsageError(f"logits have shape {found_BK.shape}, and torch's {reference_BK.shape}")
    # In float64: the difference itself should not be rounded.
    found, reference = found_BK.astype(np.float64), reference_BK.astype(np.float64)
    finite = bool(np.isfinite(found).all())
    absolute = float(np.abs(found - reference).max()) if finite else float("inf")
    is_number = ~np.isnan(found).any(axis=1)
    agreeing = is_number & (np.nan_to_num(found).argmax(axis=1) == reference.argmax(axis=1))
    largest = float(np.abs(reference).max())
    relative = absolute / largest if largest else (0.0 if absolute == 0 else float("inf"))
    return Parity(len(reference), int(agreeing.sum()), absolute, relative)


@dataclass(frozen=True)
class Tolerance:
    """What is asked of a file.

    Attributes:
        top1: the smallest part of the images on which the first class must be the same.
        relative: the largest difference of a logit, as a part of the largest logit; ``None`` for any.
    """

    top1: float
    relative: float | None


TOLERANCES = {
    "float32": Tolerance(top1=1.0, relative=1e-3),
    "float16": Tolerance(top1=0.99, relative=None),
    "int8": Tolerance(top1=0.97, relative=None),
}


def objection(file: str, precision: str, parity: Parity) -> str | None:
    """What speaks against a file, in a sentence without an end; ``None`` if nothing does."""
    tolerance = TOLERANCES[precision]
    if parity.top1 < tolerance.top1:
        return (
            f"{file} and torch agree in the first class on {parity.agreeing} of {parity.images} images, "
            f"{100 * parity.top1:.2f} %, below the {100 * tolerance.top1:g} % that {precision} must reach"
        )
    if tolerance.relative is not None and not parity.relative <= tolerance.relative:
        return (
            f"the logits of {file} differ from torch's by {parity.relative:.1e} of the largest, "
            f"above the {tolerance.relative:g} that {precision} may"
        )
    return None


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
