"""The common style of the figures, and their kinds of plots."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from covpool.drawing import LIGHT, dress, new_figure
from lab.paper.claims import errors

Results = dict[str, Any]
# Wide enough for two panels. At half a page, letters are as large as those of the text.
WIDTH, HEIGHT = 7.2, 3.4
# Distinguishable with any color vision.
COLOURS = ("#0b6bb8", "#d1570a", "#3a3f45", "#b04a93", "#2a8f6b")
MARKS = ("o", "s", "^", "D", "v")


def empty_figure(height: float = HEIGHT) -> Figure:
    """Return an empty figure in the common size and colors."""
    return new_figure(LIGHT, WIDTH, height)


def panel(figure: Figure, x: str, y: str, axes: Axes | None = None) -> Axes:
    """Return axes with labels, over the whole figure if none are given."""
    axes = figure.subplots() if axes is None else axes
    dress(axes, LIGHT)
    axes.set_xlabel(x, fontsize=10)
    axes.set_ylabel(y, fontsize=10)
    return axes


def points(
    axes: Axes, results: Results, at: Mapping[str, float], label: str, *, line: bool, colour: int = 0
) -> None:
    """Plot mean errors of rows at given x values, with bars of one standard deviation."""
    values_at = {place: errors(results, row) for row, place in at.items()}
    known = {place: values for place, values in values_at.items() if values}
    if not known:
        return
    means = [statistics.mean(values) for values in known.values()]
    bars = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in known.values()]
    style: dict[str, Any] = {"marker": MARKS[colour], "color": COLOURS[colour]}
    style |= {"linestyle": "-" if line else "none"}
    axes.errorbar(list(known), means, bars, capsize=3, linewidth=1.6, markersize=5, label=label, **style)


def level(axes: Axes, results: Results, row: str, colour: int) -> None:
    """Plot the mean error of a row as a horizontal line, with a band of one standard deviation."""
    values = errors(results, row)
    if not values:
        return
    mean = statistics.mean(values)
    axes.axhline(mean, color=COLOURS[colour], linestyle="--", linewidth=1.4, label=row)
    if len(values) > 1:
        deviation = statistics.stdev(values)
        axes.axhspan(mean - deviation, mean + deviation, color=COLOURS[colour], alpha=0.12, linewidth=0)


def curves(axes: Axes, results: Results, rows: Sequence[str], what: str = "top1_error") -> None:
    """Plot errors over the epochs: the mean of the seeds, and a band between the lowest and the highest."""
    dress(axes, LIGHT)
    axes.set_xlabel("epoch", fontsize=10)
    axes.set_ylabel("top-1 error, %", fontsize=10)
    for place, row in enumerate(rows):
        runs = [run["epochs"] for run in results["runs"] if run["label"] == row and not run["failed"]]
        if not runs:
            continue
        epochs = [[epoch[what] for epoch in together] for together in zip(*runs, strict=True)]
        x = range(1, len(epochs) + 1)
        colour = COLOURS[place]
        axes.plot(x, [statistics.mean(values) for values in epochs], color=colour, linewidth=1.6, label=row)
        lows, highs = [min(values) for values in epochs], [max(values) for values in epochs]
        axes.fill_between(x, lows, highs, color=colour, alpha=0.15, linewidth=0)
    axes.legend(frameon=False, fontsize=8)


def observed_curves(axes: Axes, results: Results, rows: Sequence[str], what: str, name: str) -> None:
    """Plot an observed value over the epochs, on a logarithmic scale; ``what`` is its path."""
    dress(axes, LIGHT)
    axes.set_xlabel("epoch", fontsize=10)
    axes.set_ylabel(name, fontsize=10)
    axes.set_yscale("log")
    for place, row in enumerate(rows):
        epochs = results["observations"].get(row, [])
        places = [(epoch["epoch"], _at(epoch, what)) for epoch in epochs]
        known = [(x, y) for x, y in places if y]
        if known:
            x, y = zip(*known, strict=True)
            axes.plot(x, y, color=COLOURS[place], marker=MARKS[place], markersize=4, linewidth=1.4, label=row)
    axes.legend(frameon=False, fontsize=8)


def eigenvalue_maps(axes: Axes, results: Results, rows: Sequence[str]) -> None:
    """Plot eigenvalues after the pooling against those before it, in the last epoch."""
    panel(axes.figure, "eigenvalue of the covariance over its trace", "after the pooling", axes)  # type: ignore[arg-type]
    axes.set_xscale("log")
    axes.set_yscale("log")
    lowest = 1e-6
    for place, row in enumerate(rows):
        epochs = results["observations"].get(row, [])
        pairs = [(x, y) for x, y in (epochs[-1]["pairs"] if epochs else []) if x > lowest and y > 0]
        if pairs:
            x, y = zip(*sorted(pairs), strict=True)
            axes.plot(x, y, ".", color=COLOURS[place], markersize=3, label=row)
    axes.plot([lowest, 1], [lowest**0.5, 1], color=LIGHT.faint, linewidth=1, label="√λ")
    axes.legend(frameon=False, fontsize=8, markerscale=2)


def ranking(figure: Figure, results: Results) -> None:
    """Plot the mean errors of rows, the lowest on top, and the time of a step over the reference's."""
    rows = {label: errors(results, label) for label in dict.fromkeys(run["label"] for run in results["runs"])}
    ordered = sorted(rows, key=lambda label: -statistics.mean(rows[label]))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for axes, name in ((left, "top-1 error, %"), (right, "time over isqrt_cov's")):
        panel(figure, name, "", axes)
    for place, label in enumerate(ordered):
        values = rows[label]
        colour = COLOURS[1] if label.startswith("isqrt_cov") else COLOURS[0]
        bar = statistics.stdev(values) if len(values) > 1 else 0.0
        left.errorbar(
            statistics.mean(values), place, xerr=bar, fmt="o", color=colour, markersize=4, capsize=2
        )
        if label in results["times"]:
            ratio = results["times"][label]["both"]["ratio"]
            right.plot(ratio["median"], place, "o", color=colour, markersize=4)
    left.set_yticks(range(len(ordered)), ordered, fontsize=8)
    right.set_xlim(left=0)
    right.axvline(1, color=LIGHT.faint, linewidth=1)


def _at(value: Any, path: str) -> Any:
    for key in path.split("."):
        value = None if value is None else value[key]
    return value
