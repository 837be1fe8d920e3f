"""The figure of :mod:`lab.experiments.arena`: accuracy of the heads against their time."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from covpool.evaluate.probe.options import AVERAGE


def draw(panels: dict[str, list[dict[str, Any]]], orange: Collection[str], path: Path) -> None:
    """Write the figure: accuracy against the time of one training run, a panel per case.

    Args:
        panels: the heads of each case by its title.
        orange: names of orange heads. ``gap`` is gray, all others, which pool covariances, are blue.
        path: file of the figure.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    lines = math.ceil(len(panels) / 2)
    figure = Figure(figsize=(14, 4.5 * lines), layout="constrained")
    for place, (title, heads) in enumerate(panels.items()):
        axes = figure.add_subplot(lines, 2, place + 1)
        heads = sorted(heads, key=lambda head: head["test"]["top1"]["mean"])
        points = [(max(head["seconds"], 0.1), 100 * head["test"]["top1"]["mean"]) for head in heads]
        firsts = [head["head"].split("@")[0].split("+")[0] for head in heads]
        colors = [
            "#D55E00" if first in orange else "#777777" if first == AVERAGE else "#0072B2" for first in firsts
        ]
        for head, point, color in zip(heads, points, colors, strict=True):
            spread = 100 * (head["test"]["top1"]["sd"] or 0.0)
            axes.errorbar(*point, yerr=spread, fmt="o", color=color, markersize=4)
        axes.set(xscale="log", xlabel="seconds per training run", ylabel="test accuracy in %")
        axes.set_title(title)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        # The names are in a column at the right, each with a line to its point.
        low, high = axes.get_ylim()
        column = apart([(accuracy - low) / (high - low) for _, accuracy in points], 0.035)
        for head, point, color, height in zip(heads, points, colors, column, strict=True):
            axes.annotate(
                head["head"],
                point,
                xytext=(1.04, height),
                textcoords="axes fraction",
                va="center",
                fontsize=8,
                color=color,
                arrowprops={"arrowstyle": "-", "color": color, "lw": 0.4, "alpha": 0.6},
            )
    figure.suptitle("blue: covariance; orange: attention and gem; gray: average")
    figure.savefig(path, dpi=110)


def apart(heights: list[float], gap: float) -> list[float]:
    """Move sorted heights as little as needed: neighbors are ``gap`` apart, and the highest is at most 1.

    Example:
        >>> apart([0.5, 0.5, 1.0], 0.25)
        [0.5, 0.75, 1.0]
    """
    heights = list(heights)
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    top = 1.0
    for i in reversed(range(len(heights))):
        heights[i] = min(heights[i], top)
        top = heights[i] - gap
    return heights
