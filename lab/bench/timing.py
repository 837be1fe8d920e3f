"""Time several functions on a noisy machine.

The functions (contenders) are timed in rounds: a round runs each of them once, in shuffled order. A
disturbance affects a whole round, so the ratio of two times within a round varies less than the times. Ratios
are computed within rounds and then summarized.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from covpool.arguments import check_whole
from covpool.device import synchronize, timed

Run = Callable[[], object]
# Called after each round with the number of rounds done and the total.
Report = Callable[[int, int], object]
# Returns such a callback, given the name of the counted items, as covpool.terminal.Progress does.
MakeProgress = Callable[[str], AbstractContextManager[Report]]
Round = dict[str, float]


def nobody(done: int, total: int) -> None:
    """Ignore progress."""


def silence(what: str) -> AbstractContextManager[Report]:
    """Return a progress callback that does nothing."""
    return nullcontext(nobody)


@dataclass(frozen=True)
class Schedule:
    """The number of rounds and calls.

    Attributes:
        rounds: number of timed rounds.
        warmup: untimed calls of each contender before the first round.
        slow_seconds: a contender is slow if a call takes longer than this.
        slow_rounds: number of rounds for a slow contender, spread evenly.
        sample_seconds: a faster contender is called repeatedly to fill this time.
    """

    rounds: int = 30
    warmup: int = 2
    slow_seconds: float = 1.0
    slow_rounds: int = 7
    sample_seconds: float = 0.02

    def __post_init__(self) -> None:
        check_whole("rounds", self.rounds, at_least=2)  # one round has no spread

    def rounds_for(self, call_seconds: float) -> int:
        """Return the number of rounds of a contender."""
        slow = call_seconds > self.slow_seconds
        return min(self.rounds, self.slow_rounds) if slow else self.rounds

    def calls_for(self, call_seconds: float) -> int:
        """Return the number of calls per sample."""
        return max(1, round(self.sample_seconds / max(call_seconds, 1e-9)))


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    q1: float
    q3: float
    count: int

    @classmethod
    def of(cls, samples: Iterable[float]) -> Spread:
        """Summarize one or more samples."""
        values = list(samples)
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, q1, q3, len(values))


@dataclass(frozen=True)
class Timing:
    """The timing of one contender: seconds per call, and ratio to the reference."""

    seconds: Spread
    ratio: Spread
    calls_per_sample: int


def time_interleaved(
    runs: Mapping[str, Run],
    *,
    reference: str,
    schedule: Schedule,
    seed: int,
    device: str = "cpu",
    log: Report = nobody,
) -> dict[str, Timing]:
    """Time every run against ``runs[reference]``."""
    warm = {name: _warm_up(run, schedule.warmup, device) for name, run in runs.items()}
    calls = {name: schedule.calls_for(seconds) for name, seconds in warm.items()}
    rounds_of = {name: schedule.rounds_for(seconds) for name, seconds in warm.items()}
    # A ratio needs both times in the same round, so the reference is in every round.
    rounds_of[reference] = schedule.rounds

    def sample(name: str) -> float:
        return seconds_per_call(runs[name], calls[name], device)

    rounds: list[Round] = []
    with garbage_collector_off():
        for times in interleaved_rounds(sample, rounds_of, schedule.rounds, random.Random(seed)):
            rounds.append(times)
            log(len(rounds), schedule.rounds)
    return {name: timing_of(name, reference, rounds, calls[name]) for name in runs}


def interleaved_rounds(
    sample: Callable[[str], float], rounds_of: Mapping[str, int], rounds: int, shuffler: random.Random
) -> Iterator[Round]:
    """Yield rounds with one sample of each contender, in shuffled order.

    A contender with fewer rounds is skipped in the others, evenly spread.
    """
    for index in range(rounds):
        names = [name for name, share in rounds_of.items() if index * share % rounds < share]
        shuffler.shuffle(names)
        yield {name: sample(name) for name in names}


def seconds_per_call(run: Run, calls: int, device: str) -> float:
    """Return the mean seconds of a few consecutive calls, after an untimed one.

    The untimed call restores caches and allocator after the previous contender.
    """
    run()
    return timed(run, calls, device) / calls


def _warm_up(run: Run, calls: int, device: str) -> float:
    """Return the seconds of the fastest warm-up call, because the first may compile."""
    seconds = []
    for _ in range(max(1, calls)):
        start = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def timing_of(name: str, reference: str, rounds: Sequence[Round], calls: int = 1) -> Timing:
    """Return the timing of a contender; ratios are to the reference in the same round."""
    took_part = [times for times in rounds if name in times]
    return Timing(
        seconds=Spread.of(times[name] for times in took_part),
        ratio=Spread.of(times[name] / times[reference] for times in took_part),
        calls_per_sample=calls,
    )


@contextmanager
def garbage_collector_off() -> Iterator[None]:
    """Collect garbage now, and disable collection during timing."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def timing_figures(timing: Timing) -> dict[str, Any]:
    """Return seconds and ratio with quartiles, and the number of rounds."""
    return {
        "seconds": spread_figures(timing.seconds),
        "ratio": spread_figures(timing.ratio),
        "rounds": timing.seconds.count,
        "calls_per_sample": timing.calls_per_sample,
    }


def rounded(number: float) -> float:
    """Round to five digits; more would be noise."""
    return float(f"{number:.5g}")


def spread_figures(spread: Spread) -> dict[str, float]:
    """Return median and quartiles."""
    return {name: rounded(getattr(spread, name)) for name in ("median", "q1", "q3")}
