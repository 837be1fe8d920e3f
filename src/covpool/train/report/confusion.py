"""Which classes are taken for which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray

from covpool.drawing.lettering import drawn, text_style
from covpool.drawing.theme import Theme, new_figure
from covpool.train.report.per_class import Errors
from covpool.train.report.record import Predictions

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
