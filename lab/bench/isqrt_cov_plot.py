"""Plot of the results: the time of each contender divided by ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from covpool.provenance import Results
from lab.bench.isqrt_cov_table import TARGETS
from lab.bench.layers import Measure

# Contender, color (distinguishable with any color vision), and text of the legend.
_BARS = {
    "plain": ("#0072B2", "the paper's equations as printed"),
    "eigh": ("#E69F00", "eigh, torch's gradient"),
    "svd": ("#CC79A7", "svd, torch's gradient"),
    "bare": ("#555555", "bare engine: the products alone"),
}
_TITLES: dict[Measure, str] = {"value_and_gradient": "Value and gradient", "value": "Value alone"}
_GROUP_WIDTH = 0.8


def draw(results: Results, path: Path) -> None:
    """Write the plot; the suffix of ``path`` sets the format."""
    from matplotlib.figure import Figure

    width = max(6.0, 2.0 + 1.6 * len(results["sizes"]))
    figure = Figure(figsize=(width, 8.2), layout="constrained")
    panels = figure.subplots(2, 1, sharey=True)
    for axes, measure in zip(panels, _TITLES, strict=True):
        _draw_panel(axes, results, measure)
    handles, labels = panels[0].get_legend_handles_labels()
    if handles:
        order = sorted(range(len(labels)), key=lambda index: labels[index] == "target")  # target last
        figure.legend(
            [handles[index] for index in order],
            [labels[index] for index in order],
            loc="outside lower center",
            ncols=3 if width > 8 else 2,
            frameon=False,
        )
    figure.suptitle(_title(results), fontsize=11)
    figure.savefig(path, dpi=130)


def _title(results: Results) -> str:
    machine, versions = results["machine"], results["versions"]
    where = machine["gpu"] or f"{machine['cpu']}, cores: {machine['cores']}"
    return (
        "Time of each contender over that of isqrt_cov\n"
        f"{where}; covpool {versions['covpool']}, torch {versions['torch']}"
    )


def _draw_panel(axes: Any, results: Results, measure: Measure) -> None:
    _dress(axes, results, measure)
    for name in _present(results):
        _draw_bars(axes, results, measure, name)
    if measure == "value_and_gradient":
        _draw_targets(axes, results)


def _draw_bars(axes: Any, results: Results, measure: Measure, name: str) -> None:
    """Draw one contender at every size. Bars start at 1: upward means ours is faster, downward slower."""
    colour, words = _BARS[name]
    label: str | None = words  # only the first bar has one, so that the legend has one entry
    for size, measured in results["sizes"].items():
        if name not in measured["contenders"]:
            continue
        ratio = measured["contenders"][name][measure]["ratio"]
        median, low, high = ratio["median"], ratio["q1"], ratio["q3"]
        x, width = _place(results, size, name)
        axes.bar(x, median - 1, width * 0.92, bottom=1, color=colour, label=label)
        axes.errorbar(x, median, [[median - low], [high - median]], color="black", capsize=3, lw=1)
        # The number is beyond the whisker and the target, so that no line crosses it.
        goal = _target_ratio(size, name) if measure == "value_and_gradient" else None
        ends = [low, high] if goal is None else [low, high, goal]
        up = median >= 1
        at = (x, max(ends) if up else min(ends))
        _note(axes, _short(median), at, 4 if up else -4, ha="center", color="black")
        label = None


def _draw_targets(axes: Any, results: Results) -> None:
    """Draw a line across each bar that has a target."""
    label: str | None = "target"
    for size, measured in results["sizes"].items():
        for name in _BARS:
            goal = _target_ratio(size, name)
            if goal is None or name not in measured["contenders"]:
                continue
            x, width = _place(results, size, name)
            axes.hlines(goal, x - width / 2, x + width / 2, color="#D00000", lw=2, zorder=3, label=label)
            label = None


def _target_ratio(size: str, contender: str) -> float | None:
    """Return the target of a bar: upward bars should reach it, downward bars should stay above it."""
    for target in TARGETS:
        if (target.size, target.contender) == (size, contender):
            return 1 / target.bound if target.quantity == "overhead" else target.bound
    return None


def _dress(axes: Any, results: Results, measure: Measure) -> None:
    """Draw everything except the data. The logarithmic scale shows losses as clearly as wins."""
    from matplotlib.ticker import LogLocator, NullLocator

    bottom, top = _limits(results)
    axes.set_yscale("log")
    axes.set_ylim(bottom, top)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=30))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.axhspan(bottom, 1, color="#FBECEA", lw=0, zorder=0)
    axes.axhline(1, color="black", lw=1)
    axes.grid(axis="y", color="#DDDDDD")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    sizes = results["sizes"]
    labels = [f"{name}\nC = {size['channels']}, n = {size['positions']}" for name, size in sizes.items()]
    axes.set_xticks(range(len(sizes)), labels)
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.55, len(sizes))
    right = len(sizes) - 0.02
    _note(axes, "ours is faster", (right, 1), 4, ha="right", color="#666666")
    _note(axes, "ours is slower", (right, 1), -4, ha="right", color="#666666")
    axes.set_ylabel("time over ours")
    axes.set_title(_TITLES[measure], loc="left", fontsize=11)


def _note(axes: Any, words: str, at: tuple[float, float], points: int, *, ha: str, color: str) -> None:
    """Write text ``points`` above a point; below it if negative."""
    axes.annotate(
        words,
        at,
        xytext=(0, points),
        textcoords="offset points",
        ha=ha,
        va="bottom" if points > 0 else "top",
        fontsize=8,
        color=color,
    )


def _present(results: Results) -> list[str]:
    return [name for name in _BARS if any(name in size["contenders"] for size in results["sizes"].values())]


def _place(results: Results, size: str, contender: str) -> tuple[float, float]:
    """Return the center and the width of a bar."""
    present = _present(results)
    width = _GROUP_WIDTH / len(present)
    offset = present.index(contender) - (len(present) - 1) / 2
    return list(results["sizes"]).index(size) + offset * width, width


def _limits(results: Results) -> tuple[float, float]:
    """Return the y limits of both panels, with space for the numbers above and below the bars."""
    ratios = [
        size["contenders"][name][measure]["ratio"]
        for size in results["sizes"].values()
        for name in _BARS
        if name in size["contenders"]
        for measure in _TITLES
    ]
    lowest = min([0.8, *(ratio["q1"] for ratio in ratios)])
    highest = max([2.0, *(ratio["q3"] for ratio in ratios)])
    room = (highest / lowest) ** 0.09
    return lowest / room, highest * room


def _short(value: float) -> str:
    return f"{value:.0f}x" if value >= 10 else f"{value:.1f}x" if value >= 2 else f"{value:.2f}x"
