"""The figure of :mod:`lab.experiments.spectra`: eigenvalues out of the layers against eigenvalues in."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

BINS_PER_DECADE = 6
# Newton-Schulz has one hue, which darkens with the number of steps.
STEPS = {1: "#82BCE0", 3: "#57A0D3", 5: "#2B7BBA", 7: "#0F559B", 9: "#08306B"}
MAIN = 5  # steps in the paper
# Color (distinguishable with any color vision), line style, and text of the legend.
REFERENCES = {
    "mpn_cov": ("black", "-", "exact root √λ (MPN-COV, SVD-Padé, SVD-Taylor)"),
    "cov": ("#7f7f7f", ":", "no normalization (Plain-COV)"),
}
RIVALS = {
    "polar_express": ("#CC79A7", (0, (4, 1.5)), "Polar Express"),
    "mpa_lya": ("#E69F00", (0, (4, 1.5)), "MPA-Lya (Padé)"),
    "mtp_lya": ("#D55E00", (0, (1.5, 1)), "MTP-Lya (Taylor)"),
}
# Color, text, and position of the text.
SIGNED = {
    "deep_o2p": ("#009E73", "DeepO2P:\nlog(λ + ε)", (4e-4, -4.6)),
    "power_tmlr": ("#8C510A", "Pow-TMLR:\n2(√λ − 1)", (1e-7, 2.2)),
}
FAINT, GRID = "#656d76", "#e4e8ec"
LEFT, RIGHT = 1.2e-8, 1.0
BOTTOM, TOP = 1e-7, 1.3
SIGNED_RANGE = (-8.0, 8.0)


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the picture; the suffix of ``path`` sets the format. Without photographs it has one panel."""
    from matplotlib.figure import Figure

    widths = [4.3, 4.1, 2.8] if results["real"] else [4.5]  # inches
    figure = Figure(figsize=(sum(widths), 5.3), layout="constrained")
    panels = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    _draw_known(panels[0], results["synthetic"])
    if results["real"]:
        finest = results["real"][-1]
        _draw_photographs(panels[1], finest)
        _draw_signed(panels[2], finest)
    handles, labels = panels[0].get_legend_handles_labels()
    columns = 3 if results["real"] else 1
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9.5)
    figure.savefig(path, dpi=150)


def _draw_known(axes: Any, part: dict[str, Any]) -> None:
    """Draw the curves, with the numbers of steps at their ends and notes on the two slopes."""
    nonzero = part["channels"] - part["zeros"]
    x, out = part["in"][:nonzero], {label: values[:nonzero] for label, values in part["out"].items()}
    title = f"(a) A known spectrum:\n{part['zeros']} of {part['channels']} eigenvalues are zero"
    _dress(axes, title, zeros="λ = 0 stays 0")
    axes.set_ylabel("eigenvalue out / √tr Σ   (Plain-COV: / tr Σ)", fontsize=10)
    _draw_curves(axes, x, out)
    for steps, colour in STEPS.items():
        at = (x[-1], out[f"isqrt_cov steps={steps}"][-1])
        words = f"{steps} steps" if steps > 1 else "1 step"
        _write(axes, words, at, (-4, 0), colour, ha="right", weight="bold" if steps == MAIN else "normal")
    _write(axes, "the root lifts\nsmall eigenvalues", (1e-6, 1e-3), (-8, 38), "black", ha="center")
    _write(axes, "large ones\nreach the root", (1e-2, 1e-1), (-4, 22), FAINT, ha="right")
    # The text is in the corner below the curves, with a thin line to its curve.
    arrow = {"arrowstyle": "-", "color": STEPS[MAIN], "lw": 0.8, "shrinkB": 0}
    words = f"slope 1: {MAIN} steps\ngive 1.5$^{MAIN}$ λ = {1.5**MAIN:.1f} λ"
    on_line = (1e-4, 1e-4 * 1.5**MAIN)
    _write(axes, words, on_line, (42, -62), STEPS[MAIN], ha="left", arrowprops=arrow)


def _draw_photographs(axes: Any, part: dict[str, Any]) -> None:
    """Draw the medians of bins as dots, and the number of eigenvalues per bin below them."""
    side, bins = math.isqrt(part["positions"]), part["bins"]
    title = (
        f"(b) {part['images']} photographs of sparrows:\n{side}×{side} positions, {part['channels']} channels"
    )
    _dress(axes, title, zeros=f"λ = 0 ({part['zeros']:.0f} of {part['channels']})\nstays 0")
    _draw_counts(axes, bins)
    _draw_curves(axes, bins["in"], bins["out"], marker="o", markersize=2.2)
    low = part["below_half_the_root"][f"isqrt_cov steps={MAIN}"]
    words = (
        f"{MAIN} steps leave {100 * low['eigenvalues']:.0f} % of\nthe nonzero eigenvalues\n"
        f"({100 * low['trace']:.0f} % of the trace)\nbelow half the root"
    )
    axes.text(0.04, 0.97, words, transform=axes.transAxes, va="top", color=STEPS[MAIN], fontsize=9)


def _draw_counts(axes: Any, bins: dict[str, Any]) -> None:
    """Draw a histogram behind the bottom of the panel."""
    counts = axes.twinx()
    places = [math.floor(math.log10(value) * BINS_PER_DECADE) for value in bins["in"]]
    edges = [[10 ** ((place + end) / BINS_PER_DECADE) for end in (0, 1)] for place in places]
    starts, widths = [low for low, _ in edges], [high - low for low, high in edges]
    counts.bar(starts, bins["count"], widths, align="edge", color="#d5dade", lw=0)
    counts.set_ylim(0, 7 * max(bins["count"]))
    counts.set_axis_off()
    axes.set_zorder(counts.get_zorder() + 1)
    axes.patch.set_visible(False)
    fullest = bins["in"][bins["count"].index(max(bins["count"]))]
    _write(axes, "how many there are", (fullest, BOTTOM), (0, 5), FAINT, ha="center")


def _draw_signed(axes: Any, part: dict[str, Any]) -> None:
    """Draw the methods with negative outputs on a linear axis, and their outputs for zero at the edge."""
    bins = part["bins"]
    _dress(axes, "(c) The two that turn negative,\nof the same photographs")
    axes.axhline(0, color=FAINT, lw=0.8)
    for label, (colour, words, place) in SIGNED.items():
        zero = bins["zero"][label]
        axes.plot(bins["in"], bins["out"][label], color=colour, lw=1.8, marker="o", markersize=2.2)
        axes.plot([LEFT], [zero], color=colour, marker="D", clip_on=False, zorder=4)
        _write(axes, f"λ = 0: −{abs(zero):.1f}", (LEFT, zero), (7, -9), colour, ha="left")
        _write(axes, words, place, (0, 0), colour, ha="left")
    highest, colour = max(bins["out"]["power_tmlr"]), SIGNED["power_tmlr"][0]
    _write(axes, f"to {highest:.0f}", (1e-2, SIGNED_RANGE[1]), (-2, -8), colour, ha="right")
    axes.set_ylim(*SIGNED_RANGE)
    axes.set_ylabel(f"eigenvalue out, as it is   (tr Σ ≈ {part['trace']:.0f})", fontsize=10)


def _draw_curves(axes: Any, x: list[float], out: dict[str, list[float]], **style: Any) -> None:
    for label, (colour, line, words) in (REFERENCES | RIVALS).items():
        axes.plot(x, out[label], color=colour, ls=line, lw=1.8, label=words, **style)
    for steps, colour in STEPS.items():
        legend = "iSQRT-COV: Newton-Schulz, 1 to 9 steps" if steps == MAIN else None
        width = 2.8 if steps == MAIN else 1.5
        axes.plot(x, out[f"isqrt_cov steps={steps}"], color=colour, lw=width, label=legend, **style)


def _dress(axes: Any, title: str, *, zeros: str | None = None) -> None:
    """Draw everything except the data; both axes are logarithmic if zeros stay zero."""
    axes.set_xscale("log")
    axes.set_xlim(LEFT, RIGHT)
    axes.set_xticks([1e-7, 1e-5, 1e-3, 1e-1])
    if zeros is not None:
        axes.set_yscale("log")
        axes.set_ylim(BOTTOM, TOP)
        axes.text(0.98, 0.24, zeros, transform=axes.transAxes, ha="right", color=FAINT, fontsize=9)
    axes.minorticks_off()
    axes.set_xlabel("eigenvalue in, λ / tr Σ", fontsize=10)
    axes.grid(color=GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=10)


def _write(
    axes: Any, words: str, at: tuple[float, float], points: tuple[float, float], colour: str, **style: Any
) -> None:
    """Write text at an offset, in points, from a point."""
    axes.annotate(
        words, at, points, textcoords="offset points", color=colour, fontsize=9, va="center", **style
    )
