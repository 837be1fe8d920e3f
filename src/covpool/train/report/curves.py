"""How the training went: loss, top-1 and learning rate from epoch to epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from covpool.drawing.lettering import drawn, text_style
from covpool.drawing.theme import Theme, dress, new_figure
from covpool.train.report.page import Picture, picture
from covpool.train.report.record import Column, RunRecord

Quantity = Literal["loss", "top-1", "learning rate"]
QUANTITIES: tuple[Quantity, ...] = ("loss", "top-1", "learning rate")
# The columns of metrics.csv, and what one of their values is multiplied by.
MEASURED: dict[Quantity, tuple[str, str, float]] = {
    "loss": ("train_loss", "loss", 1.0),
    "top-1": ("train_top1", "top1", 100.0),
}
# So many points are a line as smooth as a figure can show; single epochs are marked up to fewer.
POINTS, MARKED = 300, 30
# A linear axis would show rates that are so much smaller than the highest as 0. That is all right at the end
# of a cosine, but not for a fifth of the training.
WIDE, LONG = 15.0, 20


def draw_curves(
    runs: Mapping[str, RunRecord], theme: Theme, quantities: tuple[Quantity, ...] = QUANTITIES
) -> Figure:
    """One panel for each quantity, side by side.

    Args:
        runs: one, whose training and validation have a colour each, or two, which have a colour each.
        theme: the colours.
        quantities: which panels.
    """
    figure = new_figure(theme, 5.2 * len(quantities), 3.6)
    for axes, quantity in zip(figure.subplots(1, len(quantities), squeeze=False)[0], quantities, strict=True):
        dress(axes, theme)
        for place, (name, run) in enumerate(runs.items()):
            # matplotlib leaves what begins with an underscore out of legends, hence the space.
            label = f" {drawn(name, f'run {place + 1}', 24)}" if len(runs) > 1 else ""
            if quantity == "learning rate":
                _draw_rate(axes, run, theme.series[place], label, place)
            else:
                _draw_measured(axes, run, theme, quantity, label, place)
        _label(axes, quantity, runs, theme)
    return figure


def curve_pictures(runs: Mapping[str, RunRecord]) -> list[Picture]:
    """Each panel for itself, which a narrow page sets below each other."""
    return [
        picture(
            lambda theme, quantity=quantity: draw_curves(runs, theme, (quantity,)),  # type: ignore[misc]
            f"{quantity} from epoch to epoch",
        )
        for quantity in QUANTITIES
    ]


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
    # Twins have the same rates: the second's dashes leave the first to be seen.
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
    """A long series by the means of its parts."""
    known = np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) <= POINTS:
        return x, y
    edges = np.linspace(0, len(x), POINTS + 1).astype(np.int64)
    sizes = np.diff(edges)
    return np.add.reduceat(x, edges[:-1]) / sizes, np.add.reduceat(y, edges[:-1]) / sizes
