"""The figure of ``python -m lab bench``: layers as multiples of ``isqrt_cov``, and the speed of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from covpool.provenance import Results
from lab.bench.layers import MIB, REFERENCE
from lab.bench.table import DECOMPOSITIONS, LAYERS, PAPER_SIZE, number, times_isqrt_cov

# Distinguishable with any color vision.
LAYER, DECOMPOSITION, PAPER = "#0072B2", "#999999", "#D55E00"
POOL_COLOURS = {"isqrt_cov": "#0072B2", "mpn_cov": "#E69F00", "gap": "#777777"}
ROW = 0.27  # inches
ALONE = " alone"  # ends the label of a decomposition


def draw(results: Results, path: Path) -> None:
    """Write the figure; the suffix of ``path`` sets the format."""
    from matplotlib.figure import Figure

    rows = len(_labels(results))
    heights = [1.4 + ROW * rows] if rows else []
    heights += [3.4] if _steps(results) else []
    figure = Figure(figsize=(9.5, sum(heights) + 0.7), layout="constrained")
    parts = list(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    if rows:
        _draw_layers(parts.pop(0), results)
    if parts:
        _draw_training(parts.pop(0), _steps(results))
    figure.suptitle(_title(results), fontsize=11)
    figure.savefig(path, dpi=130)


def _title(results: Results) -> str:
    machine, versions = results["machine"], results["versions"]
    where = machine["gpu"] or f"{machine['cpu']}, cores: {machine['cores']}"
    return f"Pooling methods: {where}; covpool {versions['covpool']}, torch {versions['torch']}"


def _steps(results: Results) -> list[dict[str, Any]]:
    return results["training"]["steps"] if results["training"] else []


def _main_size(results: Results) -> str:
    """Return the size that is drawn as bars: the paper's, if it was measured."""
    return PAPER_SIZE if PAPER_SIZE in results["layers"] else next(iter(results["layers"]))


def _entries(size: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return layers and decompositions by the label of their row."""
    alone = {f"{name}{ALONE}": figures for name, figures in size["decompositions"].items()}
    return {**size["entries"], **alone}


def _labels(results: Results) -> list[str]:
    """Return the rows from the bottom: decompositions, then layers, the slowest first."""
    if not results["layers"]:
        return []
    ratios = _ratios(results["layers"][_main_size(results)])
    return sorted(ratios, key=lambda label: (not label.endswith(ALONE), -ratios[label]["median"]))


def _ratios(size: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return time ratios: layers with gradient; decompositions by their value alone, as in the paper."""
    return {
        label: figures["value" if label.endswith(ALONE) else "value_and_gradient"]["ratio"]
        for label, figures in _entries(size).items()
    }


def _words(label: str) -> str:
    """Shorten ``cbp projection=tensor_sketch`` to ``cbp (tensor_sketch)``; numbers keep their option name."""
    method, *options = label.split(" ")
    if not options or label.endswith(ALONE):
        return label
    values = [option if option[-1].isdigit() else option.partition("=")[2] for option in options]
    return f"{method} ({', '.join(values)})".replace("newton_schulz", "NS")  # the paper's abbreviation


def _draw_layers(figure: Any, results: Results) -> None:
    labels, main = _labels(results), _main_size(results)
    times, memory = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1])
    _draw_times(times, results, labels)
    _draw_memory(memory, results["layers"][main], labels, with_paper=main == PAPER_SIZE)
    for axes in (times, memory):
        axes.set_ylim(-0.7, len(labels) + 0.2)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(axis="x", color="#DDDDDD")
    times.set_yticks(range(len(labels)), [_words(label) for label in labels], fontsize=9)
    times.get_yticklabels()[labels.index(REFERENCE)].set_fontweight("bold")
    handles, words = times.get_legend_handles_labels()
    figure.legend(handles, words, loc="outside lower center", ncols=3, frameon=False, fontsize=9)


def _draw_times(axes: Any, results: Results, labels: list[str]) -> None:
    main = _main_size(results)
    ratios = _ratios(results["layers"][main])
    layers = [label for label in labels if not label.endswith(ALONE)]
    decompositions = [label for label in labels if label.endswith(ALONE)]
    _draw_bars(axes, labels, layers, ratios, LAYER, f"a layer with gradient, {main}")
    _draw_bars(axes, labels, decompositions, ratios, DECOMPOSITION, f"a decomposition over the value, {main}")
    for name, size in results["layers"].items():
        if name != main:
            ratios_there = _ratios(size)
            others = [ratios_there[label]["median"] for label in labels]
            axes.plot(
                others, range(len(labels)), "o", ms=5, mfc="white", mec="black", label=f"either, {name}"
            )
    if main == PAPER_SIZE:
        _draw_paper_times(axes, labels)
    _dress_times(axes, len(labels))
    for row, label in enumerate(labels):
        _note(axes, f"{number(ratios[label]['median'])}x", (axes.get_xlim()[1], row), ha="right", va="center")


def _draw_bars(
    axes: Any, labels: list[str], shown: list[str], ratios: dict[str, Any], colour: str, words: str
) -> None:
    """Draw bars from 1: to the right ``isqrt_cov`` is faster, to the left slower."""
    rows = [labels.index(label) for label in shown]
    widths = [ratios[label]["median"] - 1 for label in shown]
    axes.barh(rows, widths, left=1, color=colour, height=0.72, label=words)
    for row, label in zip(rows, shown, strict=True):
        axes.plot([ratios[label]["q1"], ratios[label]["q3"]], [row, row], color="black", lw=1)


def _draw_paper_times(axes: Any, labels: list[str]) -> None:
    times = {label: times_isqrt_cov(label) for label in labels}
    at = {label: time for label, time in times.items() if time is not None}
    _mark(axes, labels, at, "D", "the paper, GPU")
    for column, marker in (("Matlab on the CPU", "s"), ("cuSOLVER", "^")):
        reference = LAYERS[REFERENCE].forward
        at = {f"{name}{ALONE}": spent[column] / reference for name, spent in DECOMPOSITIONS.items()}
        _mark(axes, labels, at, marker, f"the paper, {column}")


def _mark(axes: Any, labels: list[str], at: dict[str, float], marker: str, words: str | None) -> None:
    rows = [labels.index(label) for label in at]
    axes.plot(list(at.values()), rows, marker, ms=7, color=PAPER, mec="white", mew=0.8, label=words)


def _dress_times(axes: Any, rows: int) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    # Bars of methods below 0.08 are cut; their numbers are at the edge.
    low, high = min(max(low, 0.08), 0.7), 2 * max(high, 2.0)
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=30))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.axvspan(low, 1, color="#FBECEA", lw=0, zorder=0)
    axes.axvline(1, color="black", lw=1)
    axes.set_title("Time over that of isqrt_cov", loc="left", fontsize=10)
    top = rows - 0.2
    _note(axes, "isqrt_cov is slower", (1, top), points=-4, ha="right", va="center", color="#666666")
    _note(axes, "isqrt_cov is faster", (1, top), points=4, ha="left", va="center", color="#666666")


def _note(axes: Any, words: str, at: tuple[float, float], points: int = 0, **style: Any) -> None:
    """Write text ``points`` to the right of a point."""
    axes.annotate(words, at, xytext=(points, 0), textcoords="offset points", fontsize=8.5, **style)


def _draw_memory(axes: Any, size: dict[str, Any], labels: list[str], *, with_paper: bool) -> None:
    entries = _entries(size)
    kept = [entries[label]["bytes_kept_per_image"] / MIB for label in labels]
    colours = [DECOMPOSITION if label.endswith(ALONE) else LAYER for label in labels]
    axes.barh(range(len(labels)), kept, color=colours, height=0.72)
    theirs = {label: LAYERS[label].memory or 0 for label in labels if label in LAYERS} if with_paper else {}
    _mark(axes, labels, {label: memory for label, memory in theirs.items() if memory}, "D", None)
    for row, (label, mebibytes) in enumerate(zip(labels, kept, strict=True)):
        _note(axes, f"{mebibytes:.2f}", (max(mebibytes, theirs.get(label, 0)), row), points=6, va="center")
    axes.margins(x=0.25)
    axes.set_title("MiB kept per image", loc="left", fontsize=10)


def _draw_training(figure: Any, steps: list[dict[str, Any]]) -> None:
    panels = figure.subplots(1, 2, sharey=True)
    batches = [step["batch"] for step in steps]
    for axes, count, words in zip(panels, ("one", "two"), ("One process", "Two processes"), strict=True):
        for pool in steps[0][count]:
            seconds = [step[count][pool]["seconds"] for step in steps]
            speeds = {
                which: [batch / spread[which] for batch, spread in zip(batches, seconds, strict=True)]
                for which in ("median", "q1", "q3")
            }
            colour = POOL_COLOURS[pool]
            axes.plot(batches, speeds["median"], "o-", ms=4, color=colour, label=pool)
            axes.fill_between(batches, speeds["q3"], speeds["q1"], color=colour, alpha=0.2, lw=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.minorticks_off()
        axes.grid(color="#DDDDDD")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(f"{words} of one thread{' each' if count == 'two' else ''}", loc="left", fontsize=10)
        axes.set_xlabel("images in a batch")
    panels[0].set_ylim(bottom=0)  # sets both panels, after both are drawn
    panels[0].set_ylabel("images per second, training AlexNet")
    panels[0].legend(frameon=False, fontsize=9, loc="upper left")
