"""Read the files of a run for its report."""

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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covpool.data.image_set import ENCODING, ERRORS, Names
from covpool.errors import UsageError
from covpool.storage.address import MAX_FILE_BYTES
from covpool.storage.csv import from_cell
from covpool.storage.files import open_regular, read_json, read_text

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
