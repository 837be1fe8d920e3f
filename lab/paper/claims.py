"""Claims of the paper, our measurements, and verdicts by a fixed rule.

A difference of errors counts as resolved if it exceeds its standard error times Student's t for one side at
95 percent. The spread of a run is pooled over all rows of the experiment that have several seeds and
learned, because the spread of one row with three seeds is too uncertain. The spread does not include the
choice of test images; all rows have the same test images.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure

from lab.record import shown_file
from lab.reproduce.experiments import Experiment

Results = dict[str, Any]
Verdict = Literal[
    "agrees",
    "agrees in sign",
    "equal here",
    "does not agree",
    "not resolved here",
    "not run here",
    "beyond the paper",
]
CONFIDENCE = 0.95
# Rows whose error is within this number of points of chance did not learn.
NEAR_GUESSING = 5.0
# Times with a smaller relative difference count as equal.
SAME = 0.1
# Accuracies on frozen features whose difference lies within this much of zero count as equal.
EQUAL = 0.005


@dataclass(frozen=True)
class Judgment:
    """A measurement in words, and its verdict."""

    ours: str
    verdict: Verdict


@dataclass(frozen=True)
class Claim:
    """A statement of the paper with a number or a sign.

    Attributes:
        text: the statement, in our words.
        paper: the paper's number, in words.
        judge: function from results to a judgement.
        rows: labels of the row with the lower error and of the other row, if final errors are compared.
    """

    text: str
    paper: str
    judge: Callable[[Results], Judgment]
    rows: tuple[str, str] | None = None


def lower_error(text: str, lower: str, higher: str, points: float | None = None, *, at: float = 1.0) -> Claim:
    """Return the claim that one row has a lower error than another.

    Args:
        text: text of the claim.
        lower: label of the row with the lower error in the paper.
        higher: label of the other row.
        points: difference of the top-1 errors in points; ``None`` if the paper gives only the sign.
        at: fraction of the epochs after which errors are compared.
    """

    def judge(results: Results) -> Judgment:
        ours, others = (errors(results, label, at) for label in (lower, higher))
        if not ours or not others:
            return Judgment("", "not run here")
        for label in (lower, higher):
            failed, seeds = _failed(results, label)
            if 0 < failed < seeds:  # their mean and spread mean little
                return Judgment(f"{failed} of {seeds} seeds of {label} failed", "not resolved here")
        difference = statistics.mean(others) - statistics.mean(ours)
        spread, freedom = pooled_spread(results, at)
        return _judged(difference, spread, freedom, (len(ours), len(others)), points)

    words = "lower" if points is None else f"{points:g} points lower"
    return Claim(text, words, judge, (lower, higher) if at == 1 else None)


def fails_to_learn(text: str, label: str, paper: str) -> Claim:
    """Return the claim that the error of all seeds of a row stays near chance."""

    def judge(results: Results) -> Judgment:
        percent = errors(results, label)
        if not percent:
            return Judgment("", "not run here")
        limit = guessing(results) - NEAR_GUESSING
        ours = f"{statistics.mean(percent):.1f} % error; chance is {guessing(results):.0f} %"
        if len(percent) < 2:
            return Judgment(f"{ours}, one seed", "not resolved here")
        if max(percent) < limit:
            return Judgment(ours, "does not agree")
        return Judgment(ours, "agrees" if min(percent) >= limit else "not resolved here")

    return Claim(text, paper, judge)


def less_time(text: str, less: str, more: str, ratio: float) -> Claim:
    """Return the claim that a step of one row takes less time than another's; ``ratio`` is the paper's."""

    def judge(results: Results) -> Judgment:
        times = results["times"]
        if less not in times or more not in times:
            return Judgment("", "not run here")
        return judged_ratio(times[less]["both"], times[more]["both"], ratio)

    return Claim(text, f"{ratio:.2f} times", judge)


def same_time(text: str, first: str, second: str, ratio: float) -> Claim:
    """Return the claim that steps of two rows take the same time, within a tenth."""

    def judge(results: Results) -> Judgment:
        times = results["times"]
        if first not in times or second not in times:
            return Judgment("", "not run here")
        low, middle, high = _ratio_of(times[first]["both"], times[second]["both"])
        same = low > 1 - SAME and high < 1 + SAME
        apart = high < 1 - SAME or low > 1 + SAME
        verdict: Verdict = "agrees" if same else "does not agree" if apart else "not resolved here"
        return Judgment(f"{middle:.2f} times [{low:.2f}, {high:.2f}]", verdict)

    return Claim(text, f"{ratio:.2f} times", judge)


def frozen_verdict(differences: Iterable[dict[str, float] | None]) -> Verdict:
    """Return the verdict on a claim that paired differences of accuracy, one per data set, are positive."""
    known = [difference for difference in differences if difference is not None]
    if not known:
        return "not run here"
    if all(max(-difference["low"], difference["high"]) < EQUAL for difference in known):
        return "equal here"
    above = any(difference["low"] > 0 for difference in known)
    below = any(difference["high"] < 0 for difference in known)
    if above == below:
        return "not resolved here"
    return "agrees in sign" if above else "does not agree"


def not_run(text: str, paper: str, why: str) -> Claim:
    """Return a claim that no experiment here tests."""
    return Claim(text, paper, lambda results: Judgment(why, "not run here"))


def _ratio_of(less: dict[str, Any], more: dict[str, Any]) -> tuple[float, float, float]:
    """Return ``more / less`` of two timings in the same rounds: low end, median and high end."""
    (low_less, low_more), (middle_less, middle_more), (high_less, high_more) = zip(
        _median_interval(less), _median_interval(more), strict=True
    )
    return low_more / high_less, middle_more / middle_less, high_more / low_less


def _median_interval(timing: dict[str, Any]) -> tuple[float, float, float]:
    """Return the median ratio to the reference with an interval of about 95 %.

    For normal noise, the standard error of a median is 1.25 standard deviations divided by √rounds, and the
    quartiles are 1.35 standard deviations apart: 1.96 · 1.25 / 1.35 = 1.81.
    """
    ratio = timing["ratio"]
    margin = 1.81 * (ratio["q3"] - ratio["q1"]) / math.sqrt(timing["rounds"])
    return ratio["median"] - margin, ratio["median"], ratio["median"] + margin


def judged_ratio(less: dict[str, Any], more: dict[str, Any], paper: float) -> Judgment:
    """Judge whether ``more`` takes more time than ``less``, and whether the ratio is the paper's."""
    low, middle, high = _ratio_of(less, more)
    ours = f"{middle:.2f} times [{low:.2f}, {high:.2f}]"
    if low > 1 - SAME and high < 1 + SAME:
        return Judgment(ours, "equal here")
    if low <= 1 <= high:
        return Judgment(ours, "not resolved here")
    if (middle > 1) != (paper > 1):
        return Judgment(ours, "does not agree")
    return Judgment(ours, "agrees" if low <= paper <= high else "agrees in sign")


def errors(results: Results, label: str, at: float = 1.0) -> list[float]:
    """Return the top-1 errors of a row's seeds after a fraction of the epochs; failed runs are at chance."""
    values = []
    for run in results["runs"]:
        if run["label"] == label:
            epochs = run["epochs"]
            place = max(math.ceil(at * len(epochs)), 1) - 1
            values.append(guessing(results) if run["failed"] else epochs[place]["top1_error"])
    return values


def _failed(results: Results, label: str) -> tuple[int, int]:
    """Return the number of failed runs of a row, and the number of all its runs."""
    runs = [run for run in results["runs"] if run["label"] == label]
    return sum(run["failed"] is not None for run in runs), len(runs)


def guessing(results: Results) -> float:
    """Return the error of random guessing, in percent."""
    return 100 * (1 - 1 / float(results["arguments"]["scale"]["classes"]))


def pooled_spread(results: Results, at: float = 1.0) -> tuple[float | None, int]:
    """Return the standard deviation of errors within rows, over rows that learned, and degrees of freedom."""
    rows = [errors(results, label, at) for label in dict.fromkeys(run["label"] for run in results["runs"])]
    learned = guessing(results) - NEAR_GUESSING
    several = [row for row in rows if len(row) > 1 and max(row) < learned]
    freedom = sum(len(row) - 1 for row in several)
    if not freedom:
        return None, 0
    squares = sum((len(row) - 1) * statistics.variance(row) for row in several)
    return math.sqrt(squares / freedom), freedom


def _judged(
    difference: float, spread: float | None, freedom: int, seeds: tuple[int, int], points: float | None
) -> Judgment:
    direction, points_apart = "lower" if difference >= 0 else "higher", f"{abs(difference):.1f}"
    if spread is None or min(seeds) < 2:
        return Judgment(f"{points_apart} points {direction}, one seed", "not resolved here")
    from scipy.stats import t

    error = spread * math.sqrt(sum(1 / count for count in seeds))
    ours = f"{points_apart} ± {error:.1f} points {direction}"
    margin = error * float(t.ppf(CONFIDENCE, freedom))
    if abs(difference) <= margin:
        return Judgment(ours, "not resolved here")
    if difference < 0:
        return Judgment(ours, "does not agree")
    near = points is None or abs(difference - points) <= margin
    return Judgment(ours, "agrees" if near else "agrees in sign")


@dataclass(frozen=True)
class Comparison:
    """Claims of the paper about an experiment of ``python -m lab reproduce``.

    Attributes:
        experiment: the experiment.
        at_full_size: expected differences at full size.
        claims: claims about its rows, with a number or a sign.
        draw: function that draws results into a figure.
        heads: heads on frozen features that correspond to rows, by label.
    """

    experiment: Experiment
    at_full_size: str
    claims: tuple[Claim, ...]
    draw: Callable[[Results, Figure], None]
    heads: Mapping[str, str] = field(default_factory=dict)

    def frozen(self, claim: Claim) -> tuple[str, str] | None:
        """Return the heads that test a claim on frozen features: the better one, and the other."""
        if claim.rows is None or not set(claim.rows) <= self.heads.keys():
            return None
        better, worse = (self.heads[label] for label in claim.rows)
        return better, worse


@dataclass(frozen=True)
class Measurement:
    """A table of the paper that other commands measure.

    Attributes:
        title: heading of the section.
        paper: the paper's result, in a sentence.
        at_full_size: expected differences at full size.
        files: prefixes of the names of its results files.
        claims: claims that are judged by a dictionary of results, by prefix of the file name.
    """

    title: str
    paper: str
    at_full_size: str
    files: tuple[str, ...]
    claims: tuple[Claim, ...]

    def read(self, folder: Path) -> tuple[Results, list[Path]]:
        """Return the results in a folder, and their paths."""
        files = {name: shown_file(folder, name) for name in self.files}
        paths = {name: path for name, path in files.items() if path is not None}
        return {name: json.loads(path.read_bytes()) for name, path in paths.items()}, list(paths.values())
