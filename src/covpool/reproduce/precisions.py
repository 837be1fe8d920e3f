"""Whether the precision of training matters: what was trained in two of them, from the same seed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path

from covpool.reproduce.experiments.experiment import Experiment
from covpool.reproduce.known_runs import held_runs
from covpool.reproduce.miniature.configuration import Scale


def differences(experiments: Iterable[Experiment], out: Path, scale: Scale) -> list[float]:
    """Top-1 errors in float32 less those in bfloat16, of the configurations that results hold in both."""
    found: dict[str, dict[str, float]] = {}
    for experiment in experiments:
        for name, run in held_runs(experiment, out, scale).items():
            if not run["failed"]:
                found.setdefault(name, {})[run["precision"]] = run["epochs"][-1]["top1_error"]
    both = [one for one in found.values() if {"float32", "bfloat16"} <= one.keys()]
    return [one["float32"] - one["bfloat16"] for one in both]


def sentence(points: list[float]) -> str:
    """What the differences say, in lines of the page; nothing where there are fewer than two."""
    if len(points) < 2:
        return ""
    mean, deviation = statistics.mean(points), statistics.stdev(points)
    told = "higher" if mean > 0 else "lower"
    return (
        f"Of {len(points)} networks that were trained in both, from the same seed, the error in float32 was\n"
        f"{abs(mean):.1f} points {told}, with a standard deviation of {deviation:.1f}: rows of different "
        "precisions are to be compared with that\nin mind."
    )
