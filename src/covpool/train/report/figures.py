"""Draw the figures of a report: training curves, confusions, learning rate sweep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from PIL import Image

from covpool.data.image_set import ImageSet
from covpool.drawing import Theme, drawn, dress, new_figure, text_style
from covpool.errors import BadImageError
from covpool.explain.explaining import explained
from covpool.models.model import PooledClassifier
from covpool.train.report.page import Picture, picture
from covpool.train.report.per_class import Errors
from covpool.train.report.record import Column, Predictions, RunRecord
from covpool.train.report.thumbnails import SIDE, jpeg_uri, most_confident_errors

if TYPE_CHECKING:
    from covpool.train.lr_find import Sweep

# Of those that are right, and of the errors.
EACH = 4


@dataclass(frozen=True)
class Look:
    """An image and its map.

    Attributes:
        name: of the image.
        label: the name of its class.
        predicted: the name of the class it was taken for.
        kind: ``exact`` or ``gradient``.
        picture: an address with what the network saw in it.
        map: likewise, under the map.
    """

    name: str
    label: str
    predicted: str
    kind: str
    picture: str
    map: str

    @property
    def is_right(self) -> bool:
        """Whether it was taken for what it is."""
        return self.label == self.predicted


def looks(predictions: Predictions, images: ImageSet, model: PooledClassifier) -> list[Look]:
    """The right ones and the errors that the model is surest of."""
    right = np.flatnonzero(predictions.right)
    surest = right[np.argsort(-predictions.confidence[right], kind="stable")[:EACH]]
    chosen = [*surest, *most_confident_errors(predictions, EACH)]
    places = {predictions.names[i]: i for i in chosen}
    found = dict(_looks(predictions, places, images, model))
    return [found[name] for name in places if name in found]


def _looks(
    predictions: Predictions, places: dict[str, int], images: ImageSet, model: PooledClassifier
) -> Iterator[tuple[str, Look]]:
    classes = predictions.classes
    for i in range(len(images)):
        name = images.name(i)
        if name not in places:
            continue
        place = places[name]
        label, predicted = int(predictions.labels[place]), int(predictions.predicted[place])
        try:
            one = explained(model, images.read(i), name, classes=[predicted])
        except (BadImageError, OSError):  # gone since; a report is about the others too
            continue
        first = one.found[0]
        pictures = _uri(one.picture), _uri(one.overlay(first.places))
        yield name, Look(name, classes[label], classes[predicted], first.kind, *pictures)


def _uri(picture: Image.Image) -> str:
    picture = picture.copy()
    picture.thumbnail((SIDE, SIDE))
    return jpeg_uri(picture)


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


# More could not be read.
SHOWN = 25
LETTERS = 26


def shown_classes(errors: Errors, classes: int) -> list[int]:
    """All classes if they are few; else those of the most frequent confusions, confused ones side by side."""
    if classes <= SHOWN:
        return list(range(classes))
    chosen: dict[int, None] = {}
    for pair in zip(errors.labels.tolist(), errors.predicted.tolist(), strict=True):
        if len(chosen.keys() | set(pair)) <= SHOWN:
            chosen.update(dict.fromkeys(pair))
    return list(chosen)


def draw_confusion(predictions: Predictions, errors: Errors, theme: Theme) -> Figure:
    """A row for what images are, a column for what they were taken for; a last one for classes not shown."""
    shown = shown_classes(errors, len(predictions.classes))
    if not shown:
        return _no_errors(theme)
    counts = _counts(predictions, shown)
    size = 0.42 * len(shown)
    figure = new_figure(theme, max(4.2, size + 3.2), max(3.2, size + 2.4))
    axes = figure.subplots()
    axes.imshow(_colours(counts, theme), interpolation="nearest", aspect="equal")
    _write_counts(axes, counts, theme)
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
    """Short ones; where two would be the same, also the classes' numbers."""
    short = {number: drawn(classes[number], f"class {number}", LETTERS) for number in shown}
    times = Counter(short.values())
    return [name if times[name] == 1 else f"{number}: {name}" for number, name in short.items()]


def _counts(predictions: Predictions, shown: Sequence[int]) -> NDArray[np.int64]:
    """The part of the table of all classes that is shown."""
    place = np.full(len(predictions.classes), len(shown))
    place[list(shown)] = np.arange(len(shown))
    table = np.zeros((len(shown) + 1, len(shown) + 1), dtype=np.int64)
    np.add.at(table, (place[predictions.labels], place[predictions.predicted]), 1)
    is_all = len(shown) == len(predictions.classes)
    return table[:-1, :-1] if is_all else table[:-1]


def _colours(counts: NDArray[np.int64], theme: Theme) -> NDArray[np.float64]:
    """Blue on the diagonal and orange beside it, by the share of the row."""
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


def _write_counts(axes: Axes, counts: NDArray[np.int64], theme: Theme) -> None:
    colours = _colours(counts, theme)
    for (row, column), count in np.ndenumerate(counts):
        if count:
            bright = float(colours[row, column] @ (0.299, 0.587, 0.114)) > 0.55
            axes.text(
                column,
                row,
                _short(int(count)),
                ha="center",
                va="center",
                fontsize=8,
                color="#101418" if bright else "#ffffff",
            )


def _short(count: int) -> str:
    return f"{count}" if count < 10_000 else f"{count / 1000:.0f}k"


def draw_sweep(sweep: Sweep, theme: Theme) -> Figure:
    """Single losses, the smoothed loss, and the rate that is suggested."""
    figure = new_figure(theme, 6.4, 4.0)
    axes = figure.subplots()
    dress(axes, theme)
    axes.plot(sweep.rates, sweep.losses, color=theme.series[0], linewidth=0.8, alpha=0.35)
    axes.plot(sweep.rates, sweep.smoothed, color=theme.series[0], linewidth=1.8, label="smoothed loss")
    if sweep.suggestion is not None:
        label = f"falls fastest: {sweep.suggestion:.2g}"
        axes.axvline(
            sweep.suggestion, color=theme.series[1], linewidth=1.4, linestyle=(0, (3, 2)), label=label
        )
    axes.set_xscale("log")
    axes.set_title("Loss", loc="left", fontsize=11, color=theme.ink)
    axes.set_xlabel("learning rate", fontsize=9, color=theme.faint)
    # What comes after the explosion would press all before it into a line.
    before = sweep.losses[: sweep.smoothed.argmin() + 1]
    low, high = min(before.min(), sweep.smoothed.min()), before.max()
    margin = 0.1 * (high - low) or 0.1 * high
    axes.set_ylim(low - margin, high + 3 * margin)
    axes.legend(frameon=False, fontsize=9, labelcolor=theme.ink)
    return figure
