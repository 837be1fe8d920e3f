"""What the paper says, beside what was measured, and a verdict that follows from a rule.

A difference of errors counts as resolved if it exceeds its standard error times Student's t for one side at
95 percent. The spread of a run is pooled over all rows of the experiment that have several seeds: with three
seeds a row's own would be too uncertain to judge by. What the choice of the test images adds is not in it;
all rows are tested on the same ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Results = dict[str, Any]
Verdict = Literal["agrees", "agrees in sign", "does not agree", "not resolved here", "not run here"]
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Judgement:
    """What was measured, in words, and what follows."""

    ours: str
    verdict: Verdict


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper with a number or a sign in it.

    Attributes:
        text: the sentence, in our words.
        paper: its number, in words.
        judge: what the results say of it.
    """

    text: str
    paper: str
    judge: Callable[[Results], Judgement]


def lower_error(text: str, lower: str, higher: str, points: float | None = None, *, at: float = 1.0) -> Claim:
    """The error of one row is below that of another, by so many points where the paper says so.

    Args:
        text: of the claim.
        lower: the label of the row with the lower error in the paper.
        higher: that of the other.
        points: of top-1 error between them; ``None`` where the paper has a sign alone.
        at: after which share of the epochs.
    """

    def judge(results: Results) -> Judgement:
        ours, others = (errors(results, label, at) for label in (lower, higher))
        if not ours or not others:
            return Judgement("", "not run here")
        difference = statistics.mean(others) - statistics.mean(ours)
        spread, freedom = pooled_spread(results, at)
        return _judged(difference, spread, freedom, (len(ours), len(others)), points)

    return Claim(text, "lower" if points is None else f"{points:g} points lower", judge)


def less_time(text: str, less: str, more: str, ratio: float, what: str = "both") -> Claim:
    """One row takes less time than another, the paper's ratio being given."""

    def judge(results: Results) -> Judgement:
        times = results["times"]
        if less not in times or more not in times:
            return Judgement("", "not run here")
        quick, slow = (times[label][what]["ratio"] for label in (less, more))
        middle = slow["median"] / quick["median"]
        low, high = slow["q1"] / quick["q3"], slow["q3"] / quick["q1"]
        ours = f"{middle:.2f} times [{low:.2f}, {high:.2f}]"
        if low <= 1 <= high:
            return Judgement(ours, "agrees" if abs(ratio - 1) < 0.05 else "not resolved here")
        if (middle > 1) != (ratio > 1):
            return Judgement(ours, "does not agree")
        return Judgement(ours, "agrees" if low <= ratio <= high else "agrees in sign")

    return Claim(text, f"{ratio:.2f} times", judge)


def errors(results: Results, label: str, at: float = 1.0) -> list[float]:
    """Top-1 errors of a row's seeds after a share of the epochs; a failed run has that of guessing."""
    guessing = 100 * (1 - 1 / results["arguments"]["scale"]["classes"])
    found = []
    for run in results["runs"]:
        if run["label"] == label:
            epochs = run["epochs"]
            place = max(math.ceil(at * len(epochs)), 1) - 1
            found.append(guessing if run["failed"] else epochs[place]["top1_error"])
    return found


def pooled_spread(results: Results, at: float = 1.0) -> tuple[float | None, int]:
    """The deviation of a run's error about its row's mean, and its degrees of freedom."""
    rows = [errors(results, label, at) for label in dict.fromkeys(run["label"] for run in results["runs"])]
    several = [row for row in rows if len(row) > 1]
    freedom = sum(len(row) - 1 for row in several)
    if not freedom:
        return None, 0
    squares = sum((len(row) - 1) * statistics.variance(row) for row in several)
    return math.sqrt(squares / freedom), freedom


def _judged(
    difference: float, spread: float | None, freedom: int, seeds: tuple[int, int], points: float | None
) -> Judgement:
    if spread is None or min(seeds) < 2:
        return Judgement(f"{difference:+.1f} points, one seed", "not resolved here")
    from scipy.stats import t

    error = spread * math.sqrt(sum(1 / count for count in seeds))
    ours = f"{difference:+.1f} ± {error:.1f} points"
    margin = error * float(t.ppf(CONFIDENCE, freedom))
    if abs(difference) <= margin:
        return Judgement(ours, "not resolved here")
    if difference < 0:
        return Judgement(ours, "does not agree")
    near = points is None or abs(difference - points) <= margin
    return Judgement(ours, "agrees" if near else "agrees in sign")
