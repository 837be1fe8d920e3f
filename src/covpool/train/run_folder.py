"""The folder of a run: which file is where, and what keeps it true when a run is killed and resumed."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covpool.data.batch import BadImage
from covpool.data.image_set import ImageSet
from covpool.data.names import ENCODING, ERRORS
from covpool.durable.replacing import replace_file
from covpool.models.bundles.strict_json import plain_json
from covpool.train.csv_file import csv_bytes
from covpool.train.metrics import Predictions


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The files of a run. The first process alone writes them.

    Attributes:
        path: of the folder.
    """

    path: Path

    @property
    def recipe(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.yaml"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def bundle(self) -> Path:
        """The best model so far."""
        return self.path / "bundle"

    @property
    def log(self) -> Path:
        """A line of JSON for some steps, and for what happened."""
        return self.path / "log.jsonl"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's events."""
        return self.path / "tensorboard"

    def read_summary(self) -> dict[str, Any] | None:
        """What a finished run came to; ``None`` if it is not finished."""
        try:
            summary: dict[str, Any] = json.loads((self.path / "summary.json").read_bytes())
        except FileNotFoundError:
            return None
        return summary if summary["finished"] else None

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """In place of one that may be there."""
        replace_file(
            self.path / "summary.json", json.dumps(plain_json("summary", summary), indent=2).encode()
        )

    def write_metrics(self, history: Sequence[Mapping[str, Any]]) -> None:
        """A line an epoch."""
        names = dict.fromkeys(name for epoch in history for name in epoch)
        self._write_csv("metrics.csv", list(names), [[row.get(name) for name in names] for row in history])

    def write_bad_images(self, bad: Sequence[BadImage]) -> None:
        """Every image that could not be used so far."""
        self._write_csv("bad_images.csv", BadImage._fields, bad)

    def read_bad_images(self) -> list[BadImage]:
        """Those that were found before the run was resumed."""
        try:
            text = (self.path / "bad_images.csv").read_text(ENCODING, ERRORS)
        except FileNotFoundError:
            return []
        return [BadImage(*row) for row in list(csv.reader(io.StringIO(text)))[1:]]

    def write_predictions(self, predictions: Predictions, images: ImageSet) -> None:
        """For each image of a set."""
        columns = ("name", "label", "predicted", "confidence", "label_confidence", "loss")
        classes = images.classes
        rows = zip(
            [images.name(i) for i in predictions.ids.tolist()],
            [classes[i] for i in predictions.labels.tolist()],
            [classes[i] for i in predictions.predicted.tolist()],
            predictions.confidence.tolist(),
            predictions.label_confidence.tolist(),
            predictions.losses.tolist(),
            strict=True,
        )
        self._write_csv("predictions.csv", columns, list(rows))

    def append_log(self, line: Mapping[str, Any]) -> None:
        """Add a line to the log."""
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain_json("log", line)) + "\n")

    def cut_log(self, step: int) -> None:
        """Take out what came after a step: it is about to come again."""
        if not self.log.exists():
            return
        kept = []
        for line in self.log.read_bytes().splitlines(keepends=True):
            try:
                if json.loads(line).get("step", 0) > step:
                    continue
            except ValueError:  # a kill left half a line
                continue
            kept.append(line)
        replace_file(self.log, b"".join(kept))

    def _write_csv(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        replace_file(self.path / name, csv_bytes(columns, rows))
