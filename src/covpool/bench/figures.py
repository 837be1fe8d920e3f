"""What the clock says, as results hold it: plain numbers of five digits."""

from __future__ import annotations

from typing import Any

from covpool.bench.timing import Spread, Timing


def timing_figures(timing: Timing) -> dict[str, Any]:
    """Seconds and ratio with quartiles, and from how many rounds."""
    return {
        "seconds": spread_figures(timing.seconds),
        "ratio": spread_figures(timing.ratio),
        "rounds": timing.seconds.count,
        "calls_per_sample": timing.calls_per_sample,
    }


def rounded(number: float) -> float:
    """Five digits: more is noise."""
    return float(f"{number:.5g}")


def spread_figures(spread: Spread) -> dict[str, float]:
    """Median and quartiles."""
    return {name: rounded(getattr(spread, name)) for name in ("median", "q1", "q3")}
