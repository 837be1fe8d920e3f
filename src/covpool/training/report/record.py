"""Read the files of a run for its report, and compute accuracy per class with intervals."""

from __future__ import annotations

import csv
import io
import json
import math
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from covpool.data.image_set import ENCODING, ERRORS, Names
from covpool.errors import UsageError
from covpool.storage.address import MAX_FILE_BYTES
from covpool.storage.files import from_cell, open_regular, read_json, read_text
from covpool.training.run_folder import csv_bytes

Column = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Predictions:
    """The predictions of the best model for a split.

    Attributes:
        classes: the name of each class.
        names: of the images.
        labels: the class of each, by number.
        predicted: the predicted class of each, by number.
        confidence: its probability.
        label_confidence: the probability of the true class.
    """

    classes: tuple[str, ...]
    names: Names
    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]
    confidence: Column
    label_confidence: Column

    def __len__(self) -> int:
        return len(self.names)

    @property
    def right(self) -> NDArray[np.bool_]:
        """Whether each prediction is correct."""
        return np.equal(self.labels, self.predicted)


@dataclass(frozen=True, eq=False)
class RunRecord:
    """The files of a run.

    Attributes:
        summary: of ``summary.json``.
        epochs: the columns of ``metrics.csv``; NaN where a field is empty.
        steps: ``step``, ``loss`` and ``lr`` of ``log.jsonl``.
        events: the number of events of each kind in ``log.jsonl``.
        predictions: of ``predictions.csv``; empty if there is no such file.
        recipe: ``recipe.yaml`` as text.
    """

    summary: Mapping[str, Any]
    epochs: Mapping[str, Column]
    steps: Mapping[str, Column]
    events: Mapping[str, int]
    predictions: Predictions
    recipe: str

    def epoch_column(self, name: str) -> Column:
        """Return a column of ``metrics.csv``; NaN if the file does not have it."""
        return self.epochs.get(name, np.full(self.epoch_ends.shape, math.nan))

    @property
    def epoch_ends(self) -> Column:
        """The number of finished epochs at each line of ``metrics.csv``."""
        return self.epochs.get("epoch", np.empty(0))

    @property
    def step_positions(self) -> Column:
        """The position of each step of ``log.jsonl``, in epochs; all are in the first if none ended."""
        ends, steps = self.epoch_ends, self.steps["step"]
        if len(ends):
            return steps * float(ends[-1] / max(self.epoch_column("step")[-1], 1.0))
        return steps / max(float(steps.max(initial=0)), 1.0)


def read_run(folder: Path) -> RunRecord:
    """Read the files of a run; only ``summary.json`` must exist."""
    summary = read_json(folder / "summary.json")
    steps, events = _read_log(folder / "log.jsonl")
    recipe = folder / "recipe.yaml"
    return RunRecord(
        summary,
        _read_metrics(folder / "metrics.csv"),
        steps,
        events,
        read_predictions(folder / "predictions.csv", tuple(summary["classes"])),
        read_text(recipe) if recipe.exists() else "",
    )


def _read_metrics(path: Path) -> dict[str, Column]:
    rows = list(_rows(path))
    return {name: np.array([_number(row[name]) for row in rows]) for name in (rows[0] if rows else ())}


def _read_log(path: Path) -> tuple[dict[str, Column], Counter[str]]:
    steps: dict[int, tuple[float, float]] = {}  # a step that is repeated after a kill counts once
    events: Counter[str] = Counter()
    for entry in _entries(path):
        if "event" in entry:
            events[str(entry["event"])] += 1
        elif "step" in entry:
            steps[int(entry["step"])] = _number(entry.get("loss")), _number(entry.get("lr"))
    table = np.array([(step, *values) for step, values in sorted(steps.items())]).reshape(-1, 3)
    return dict(zip(("step", "loss", "lr"), table.T, strict=True)), events


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with io.TextIOWrapper(_opened(path), "utf-8", "replace") as file:
        for line in file:
            try:
                entry = json.loads(line)
            except ValueError:  # cut short by a kill
                continue
            if isinstance(entry, dict):
                yield entry


def read_predictions(path: Path, classes: tuple[str, ...]) -> Predictions:
    """Read ``predictions.csv``; nothing if there is no such file."""
    numbers = {name: number for number, name in enumerate(classes)}
    columns: tuple[array[Any], ...] = (array("q"), array("q"), array("d"), array("d"))

    def names() -> Iterator[str]:  # row by row: there may be millions
        for row in _rows(path):
            try:
                values = numbers[row["label"]], numbers[row["predicted"]]
            except KeyError as error:
                raise UsageError(f"{path} has a class {error} that summary.json does not list") from error
            confidences = _number(row["confidence"]), _number(row["label_confidence"])
            for column, value in zip(columns, (*values, *confidences), strict=True):
                column.append(value)
            yield row["name"]

    return Predictions(classes, Names(names()), *(np.array(column) for column in columns))


def _rows(path: Path) -> Iterator[dict[str, str]]:
    if not path.exists():
        return
    with io.TextIOWrapper(_opened(path), ENCODING, ERRORS, newline="") as file:
        for row in csv.DictReader(file):
            yield {name: from_cell(text) if isinstance(text, str) else text for name, text in row.items()}


def _opened(path: Path) -> io.BufferedReader:
    """Open a table or a log, which is read by lines."""
    return io.BufferedReader(open_regular(path, MAX_FILE_BYTES))


def _number(value: object) -> float:
    """Return NaN for a missing value."""
    return math.nan if value is None or value == "" else float(str(value))


# 95 % of a normal distribution lies within this many standard deviations.
Z = 1.959963984540054
HEADER = ("class", "images", "precision", "recall", "f1", "most_confused_with", "times")


def wilson(right: int, images: int) -> tuple[float, float]:
    """Return the 95 % Wilson interval of an accuracy.

    Example:
        >>> low, high = wilson(8, 10)
        >>> f"{low:.3f} {high:.3f}"
        '0.490 0.943'
    """
    interval = binomtest(right, images).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


@dataclass(frozen=True)
class PairedDifference:
    """Two models on the same images; ``first_only`` are those that only the first gets right."""

    images: int
    first_only: int
    second_only: int

    @property
    def difference(self) -> float:
        """The top-1 accuracy of the first minus that of the second."""
        return (self.first_only - self.second_only) / self.images

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the difference: Wald's with half an image added to each of the four fields.

        It covers small samples too (Agresti and Min 2005), and is not empty where the models agree.
        """
        images = self.images + 2
        first, second = self.first_only + 0.5, self.second_only + 0.5
        middle = (first - second) / images
        half = Z * math.sqrt(first + second - (first - second) ** 2 / images) / images
        return max(-1.0, middle - half), min(1.0, middle + half)

    @property
    def p_value(self) -> float:
        """The p-value of McNemar's exact test."""
        differing = self.first_only + self.second_only
        return float(binomtest(self.first_only, differing).pvalue) if differing else 1.0

    @property
    def is_clear(self) -> bool:
        """Whether the difference is significant, by the test and by the interval."""
        low, high = self.interval
        return self.p_value < 0.05 and not low <= 0 <= high


class ClassRow(NamedTuple):
    """The figures of a class; NaN where there are no images. ``confused_with`` is the most frequent error."""

    name: str
    images: int
    precision: float
    recall: float
    f1: float
    confused_with: str
    times: int


class Errors(NamedTuple):
    """Pairs of confused classes, most frequent first, and how often each occurs."""

    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]
    times: NDArray[np.int64]


def errors_by_pair(predictions: Predictions) -> Errors:
    """Count the errors. Only pairs that occur are kept: a full table is too large for many classes."""
    wrong, classes = ~predictions.right, len(predictions.classes)
    pairs, times = np.unique(
        predictions.labels[wrong] * classes + predictions.predicted[wrong], return_counts=True
    )
    order = np.argsort(-times, kind="stable")
    return Errors(pairs[order] // classes, pairs[order] % classes, times[order])


def per_class(predictions: Predictions) -> list[ClassRow]:
    """Return a row for each class, in the order of the classes."""
    classes = len(predictions.classes)
    images = np.bincount(predictions.labels, minlength=classes)
    taken = np.bincount(predictions.predicted, minlength=classes)
    right = np.bincount(predictions.labels[predictions.right], minlength=classes)
    confused: dict[int, tuple[str, int]] = {}
    for label, predicted, times in zip(
        *(column.tolist() for column in errors_by_pair(predictions)), strict=True
    ):
        confused.setdefault(label, (predictions.classes[predicted], times))
    return [
        ClassRow(
            name,
            int(images[number]),
            _share(right[number], taken[number]),
            _share(right[number], images[number]),
            _share(2 * right[number], images[number] + taken[number]),
            *confused.get(number, ("", 0)),
        )
        for number, name in enumerate(predictions.classes)
    ]


def per_class_csv(rows: list[ClassRow]) -> bytes:
    """Return the rows as CSV; NaN is left empty."""
    return csv_bytes(HEADER, ([_short(value) for value in row] for row in rows))


def _share(part: int, whole: int) -> float:
    return float(part / whole) if whole else math.nan


def _short(value: object) -> object:
    if not isinstance(value, float):
        return value
    return "" if math.isnan(value) else f"{value:.6g}"
