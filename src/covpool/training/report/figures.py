"""Draw the figures of a report: training curves, confusions, learning rate sweep."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from covpool.drawing import DARK, LIGHT, Theme, drawn, dress, new_figure, png, text_style
from covpool.training.report.record import Column, Errors, Predictions, RunRecord
from covpool.training.report.rendering import Tile, squared

Quantity = Literal["loss", "top-1", "learning rate"]
QUANTITIES: tuple[Quantity, ...] = ("loss", "top-1", "learning rate")
# The columns of metrics.csv for training and validation, and a factor.
MEASURED: dict[Quantity, tuple[str, str, float]] = {
    "loss": ("train_loss", "loss", 1.0),
    "top-1": ("train_top1", "top1", 100.0),
}
# The most points of a line, and the most epochs with a marker each.
POINTS, MARKED = 300, 30
# The axis of the learning rate is logarithmic if the highest is WIDE times the LONG-th percentile.
WIDE, LONG = 15.0, 20
# The most classes of a confusion matrix, and the most letters of a name.
SHOWN, LETTERS = 25, 26
# Images per row of worst.png, and the most letters of a name there.
COLUMNS, TILE_LETTERS = 6, 22


class Picture(NamedTuple):
    """A figure as data URIs for light and dark pages, its size in pixels, and a description."""

    light: str
    dark: str
    width: int
    height: int
    alt: str


def picture(draw: Callable[[Theme], Figure], alt: str) -> Picture:
    """Draw a figure for light and dark pages."""
    figure = draw(LIGHT)
    width, height = (round(96 * inches) for inches in figure.get_size_inches())
    return Picture(_png_uri(figure), _png_uri(draw(DARK)), width, height, alt)


def draw_curves(
    runs: Mapping[str, RunRecord], theme: Theme, quantities: tuple[Quantity, ...] = QUANTITIES
) -> Figure:
    """Draw one panel per quantity, side by side.

    Args:
        runs: one run, with a color for training and one for validation, or two with a color each.
        theme: the colors.
        quantities: the panels.
    """
    figure = new_figure(theme, 5.2 * len(quantities), 3.6)
    for axes, quantity in zip(figure.subplots(1, len(quantities), squeeze=False)[0], quantities, strict=True):
        dress(axes, theme)
        for place, (name, run) in enumerate(runs.items()):
            # matplotlib leaves names that start with an underscore out of legends, hence the space.
            label = f" {drawn(name, f'run {place + 1}', 24)}" if len(runs) > 1 else ""
            if quantity == "learning rate":
                _draw_rate(axes, run, theme.series[place], label, place)
            else:
                _draw_measured(axes, run, theme, quantity, label, place)
        _label(axes, quantity, runs, theme)
    return figure


def curve_pictures(runs: Mapping[str, RunRecord]) -> list[Picture]:
    """Draw each panel as a separate figure, for narrow pages."""
    return [
        picture(
            lambda theme, quantity=quantity: draw_curves(runs, theme, (quantity,)),  # type: ignore[misc]
            f"{quantity} from epoch to epoch",
        )
        for quantity in QUANTITIES
    ]


def _png_uri(figure: Figure) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(figure)).decode()}"


def _draw_measured(
    axes: Axes, run: RunRecord, theme: Theme, quantity: Quantity, name: str, place: int
) -> None:
    train, validation, factor = MEASURED[quantity]
    alone = not name
    colours = theme.series if alone else (theme.series[place],) * 2
    if alone and quantity == "loss":
        x, y = _thinned(run.step_positions, run.steps["loss"])
        axes.plot(x, y, color=colours[0], linewidth=0.8, alpha=0.35)
    for column, what, colour, dashes in (
        (train, "training", colours[0], "-" if alone else (0, (2, 1.5))),
        (validation, "validation", colours[1], "-"),
    ):
        values = run.epoch_column(column) * factor
        if not np.isfinite(values).any():
            continue
        marker = "o" if len(values) <= MARKED else ""
        axes.plot(
            run.epoch_ends,
            values,
            color=colour,
            linestyle=dashes,
            marker=marker,
            markersize=3.5,
            linewidth=1.8,
            label=what if alone else f"{name}, {what}",
        )


def _draw_rate(axes: Axes, run: RunRecord, colour: str, name: str, place: int) -> None:
    x, y = _thinned(run.step_positions, run.steps["lr"])
    if not len(x):
        x, y = run.epoch_ends, run.epoch_column("lr")
    # Two runs have the same learning rate: the dashes of the second keep the first visible.
    dashes = "-" if place == 0 else (0, (3, 3))
    axes.plot(x, y, color=colour, linewidth=1.8, linestyle=dashes, label=name, marker="o" * (len(x) == 1))
    known = np.concatenate([line.get_ydata() for line in axes.get_lines()])
    known = known[np.isfinite(known)]
    if len(known) and known.min() > 0 and known.max() > WIDE * np.percentile(known, LONG):
        axes.set_yscale("log")


def _label(axes: Axes, quantity: Quantity, runs: Mapping[str, RunRecord], theme: Theme) -> None:
    unit = " (%)" if quantity == "top-1" else ""
    axes.set_title(f"{quantity.capitalize()}{unit}", loc="left", fontsize=11, color=theme.ink)
    axes.set_xlabel("epochs", fontsize=9, color=theme.faint)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlim(left=0)
    if len(runs) == 1 and quantity != "learning rate":
        _mark_best(axes, next(iter(runs.values())), theme)
    handles, labels = axes.get_legend_handles_labels()
    if any(labels):
        legend = axes.legend(handles, labels, frameon=False, fontsize=9, labelcolor=theme.ink)
        for text in legend.get_texts():
            text.set(**text_style())


def _mark_best(axes: Axes, run: RunRecord, theme: Theme) -> None:
    if run.summary.get("validation") is None or len(run.epoch_ends) < 2:
        return
    epoch = run.summary["best_epoch"]
    axes.axvline(epoch, color=theme.faint, linewidth=1, linestyle=(0, (1, 2)), label=f"best epoch: {epoch}")


def _thinned(x: Column, y: Column) -> tuple[Column, Column]:
    """Average a long series over equal parts."""
    known = np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) <= POINTS:
        return x, y
    edges = np.linspace(0, len(x), POINTS + 1).astype(np.int64)
    sizes = np.diff(edges)
    return np.add.reduceat(x, edges[:-1]) / sizes, np.add.reduceat(y, edges[:-1]) / sizes


def shown_classes(errors: Errors, classes: int) -> list[int]:
    """Return all classes if they are few, else those of the most frequent confusions."""
    if classes <= SHOWN:
        return list(range(classes))
    chosen: dict[int, None] = {}
    for pair in zip(errors.labels.tolist(), errors.predicted.tolist(), strict=True):
        if len(chosen.keys() | set(pair)) <= SHOWN:
            chosen.update(dict.fromkeys(pair))
    return list(chosen)


def draw_confusion(predictions: Predictions, errors: Errors, theme: Theme) -> Figure:
    """Draw true classes as rows and predicted ones as columns; the last column is for other classes."""
    shown = shown_classes(errors, len(predictions.classes))
    if not shown:
        return _no_errors(theme)
    counts = _counts(predictions, shown)
    size = 0.42 * len(shown)
    figure = new_figure(theme, max(4.2, size + 3.2), max(3.2, size + 2.4))
    axes = figure.subplots()
    colors = _colours(counts, theme)
    axes.imshow(colors, interpolation="nearest", aspect="equal")
    _write_counts(axes, counts, colors)
    names = _names(predictions.classes, shown)
    columns = names + ["other classes"] * (counts.shape[1] - len(shown))
    style = {**text_style(), "color": theme.ink, "fontsize": 9}
    axes.set_xticks(range(len(columns)), columns, rotation=45, ha="right", rotation_mode="anchor", **style)
    axes.set_yticks(range(len(names)), names, **style)
    axes.spines[:].set_visible(False)
    axes.set_facecolor(theme.paper)
    axes.set_xlabel("predicted class", color=theme.faint)
    axes.set_ylabel("true class", color=theme.faint)
    _separate_cells(axes, counts, theme)
    return figure


def _no_errors(theme: Theme) -> Figure:
    figure = new_figure(theme, 4.2, 3.2)
    figure.text(0.5, 0.5, "no errors", ha="center", va="center", color=theme.ink, fontsize=14)
    return figure


def _names(classes: Sequence[str], shown: Sequence[int]) -> list[str]:
    """Shorten the names; where two are the same, add the class numbers."""
    short = {number: drawn(classes[number], f"class {number}", LETTERS) for number in shown}
    times = Counter(short.values())
    return [name if times[name] == 1 else f"{number}: {name}" for number, name in short.items()]


def _counts(predictions: Predictions, shown: Sequence[int]) -> NDArray[np.int64]:
    """Count the images of the shown classes."""
    place = np.full(len(predictions.classes), len(shown))
    place[list(shown)] = np.arange(len(shown))
    table = np.zeros((len(shown) + 1, len(shown) + 1), dtype=np.int64)
    np.add.at(table, (place[predictions.labels], place[predictions.predicted]), 1)
    is_all = len(shown) == len(predictions.classes)
    return table[:-1, :-1] if is_all else table[:-1]


def _colours(counts: NDArray[np.int64], theme: Theme) -> NDArray[np.float64]:
    """Color the diagonal blue and errors orange, by the share of the row."""
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    off_diagonal = np.eye(*counts.shape) == 0
    worst = max(share[off_diagonal].max(initial=0.0), 0.1)
    right = LinearSegmentedColormap.from_list("right", theme.right)(share)
    wrong = LinearSegmentedColormap.from_list("wrong", theme.wrong)(share / worst)
    colours = np.where(off_diagonal[..., None], wrong, right)[..., :3]
    colours[(counts == 0) & off_diagonal] = to_rgb(theme.grid)
    return np.asarray(colours)


def _separate_cells(axes: Axes, counts: NDArray[np.int64], theme: Theme) -> None:
    rows, columns = counts.shape
    axes.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    axes.grid(which="minor", color=theme.paper, linewidth=1.2)
    axes.tick_params(which="both", length=0)


def _write_counts(axes: Axes, counts: NDArray[np.int64], colours: NDArray[np.float64]) -> None:
    for (row, column), count in np.ndenumerate(counts):
        if count:
            bright = float(colours[row, column] @ (0.299, 0.587, 0.114)) > 0.55
            text = f"{count}" if count < 10_000 else f"{count / 1000:.0f}k"
            color = "#101418" if bright else "#ffffff"
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color=color)


def draw_worst(tiles: Sequence[Tile], theme: Theme) -> Figure:
    """Draw images in rows, each with its class, the prediction and the confidence."""
    rows = max(1, -(-len(tiles) // COLUMNS))
    columns = min(COLUMNS, max(len(tiles), 3))
    if not tiles:
        return _no_errors(theme)
    figure = new_figure(theme, 2.1 * columns, 2.75 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in panels:
        axes.set_axis_off()
    for axes, tile in zip(panels, tiles, strict=False):
        _draw_tile(axes, tile, theme)
    return figure


def _draw_tile(axes: Axes, tile: Tile, theme: Theme) -> None:
    if tile.picture is None:
        axes.imshow(np.full((2, 2, 3), 0.5), interpolation="nearest")
        axes.text(0.5, 0.5, "no picture", ha="center", color="white", transform=axes.transAxes, fontsize=8)
    else:
        axes.imshow(squared(tile.picture, theme.grid), interpolation="lanczos")
    lines = (
        (f"is {drawn(tile.label, '(no font for its name)', TILE_LETTERS)}", theme.ink),
        (f"taken for {drawn(tile.predicted, '(no font for its name)', TILE_LETTERS)}", theme.series[1]),
        (f"{100 * tile.confidence:.1f} % sure", theme.faint),
    )
    for place, (words, colour) in enumerate(lines):
        axes.annotate(
            words,
            (0, 0),
            xytext=(0, -9 - 10 * place),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=7.5,
            color=colour,
            **text_style(),
        )


def draw_sweep(
    rates: Column, losses: Column, smoothed: Column, suggestion: float | None, theme: Theme
) -> Figure:
    """Draw the losses, the smoothed loss, and the suggested learning rate."""
    figure = new_figure(theme, 6.4, 4.0)
    axes = figure.subplots()
    dress(axes, theme)
    axes.plot(rates, losses, color=theme.series[0], linewidth=0.8, alpha=0.35)
    axes.plot(rates, smoothed, color=theme.series[0], linewidth=1.8, label="smoothed loss")
    if suggestion is not None:
        label = f"falls fastest: {suggestion:.2g}"
        axes.axvline(suggestion, color=theme.series[1], linewidth=1.4, linestyle=(0, (3, 2)), label=label)
    axes.set_xscale("log")
    axes.set_title("Loss", loc="left", fontsize=11, color=theme.ink)
    axes.set_xlabel("learning rate", fontsize=9, color=theme.faint)
    # The losses after divergence would flatten the rest.
    before = losses[: smoothed.argmin() + 1]
    low, high = min(before.min(), smoothed.min()), before.max()
    margin = 0.1 * (high - low) or 0.1 * high
    axes.set_ylim(low - margin, high + 3 * margin)
    axes.legend(frameon=False, fontsize=9, labelcolor=theme.ink)
    return figure
