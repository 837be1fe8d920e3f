"""Accuracy against confidence: on the diagonal, a network is right as often as it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from covpool.drawing.theme import Theme, dress, new_figure
from covpool.evaluate.accuracy.calibration import BINS

WIDTH = 1 / BINS


def draw_reliability(metrics: Mapping[str, float], calibration: Mapping[str, Any], theme: Theme) -> Figure:
    """A bar for each bin of confidences: how often it is right, and below, how many images it has.

    Args:
        metrics: with ``expected_calibration_error`` and ``maximum_calibration_error``.
        calibration: ``images``, ``confidence`` and ``accuracy`` of each bin.
        theme: the colours.
    """
    figure = new_figure(theme, 4.8, 5.6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for axes in (above, below):
        dress(axes, theme)
    _draw_bins(above, calibration["confidence"], calibration["accuracy"], theme)
    errors = (100 * metrics[f"{name}_calibration_error"] for name in ("expected", "maximum"))
    above.set_title(
        "calibration error: expected {:.1f} %, largest of a bin {:.1f} %".format(*errors),
        fontsize=10,
        color=theme.ink,
        loc="left",
    )
    middles = (np.arange(BINS) + 0.5) * WIDTH
    below.bar(middles, calibration["images"], 0.9 * WIDTH, color=theme.faint)
    below.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    below.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    below.set_ylabel("images", color=theme.faint)
    below.set_xlabel("confidence", color=theme.faint)
    below.set_xlim(0, 1)
    return figure


def _draw_bins(
    axes: Axes, confidence: Sequence[float | None], accuracy: Sequence[float | None], theme: Theme
) -> None:
    filled = [number for number, value in enumerate(accuracy) if value is not None]
    middles = (np.array(filled) + 0.5) * WIDTH
    right = np.array([accuracy[number] for number in filled], dtype=float)
    sure = np.array([confidence[number] for number in filled], dtype=float)
    axes.plot((0, 1), (0, 1), color=theme.faint, linewidth=1, linestyle=(0, (4, 3)))
    axes.bar(middles, right, 0.9 * WIDTH, color=theme.series[0], label="accuracy")
    axes.hlines(
        sure,
        middles - 0.45 * WIDTH,
        middles + 0.45 * WIDTH,
        color=theme.series[1],
        linewidth=2.2,
        label="mean confidence",
    )
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("share that is right", color=theme.faint)
    axes.legend(loc="upper left", frameon=False, labelcolor=theme.ink, fontsize=9)
