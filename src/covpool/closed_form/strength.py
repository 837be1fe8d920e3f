"""Choose the strength of the regularization of a linear classifier."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
# Strengths are powers of this.
STEP = 10**0.5
MOST_STEPS = 12


def silent(done: int, total: int) -> None:
    """Report nothing."""


def best_strength(error: Callable[[float], float], progress: Progress = silent) -> float:
    """Return the strength with the smallest error: from 1 downhill, in steps of half a decade.

    Args:
        error: solve with a strength, and return the error.
        progress: called with the number of strengths that were tried, and the largest number of trials.
    """
    known: dict[int, float] = {}

    def at(step: int) -> float:
        if step not in known:
            progress(len(known), MOST_STEPS + 2)
            known[step] = error(STEP**step)
        return known[step]

    first = at(0)
    direction = -1 if at(-1) < first else 1
    step = 0
    while abs(step) < MOST_STEPS and at(step + direction) < at(step):
        step += direction
    return STEP**step
