"""The folder of a training run and the files in it."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from covpool.data.image_set import ENCODING, ERRORS, ImageSet
from covpool.data.loader import BadImage
from covpool.errors import BundleError, TrainingError, UsageError
from covpool.models.card import parse, plain_json
from covpool.models.create import pretrained_config
from covpool.processes import Processes
from covpool.storage.address import MAX_FILE_BYTES
from covpool.storage.files import (
    MAX_TEXT_BYTES,
    append_file,
    csv_text,
    from_cell,
    json_bytes,
    read_file,
    replace_file,
)
from covpool.training.metrics import Predictions
from covpool.training.recipe import Recipe
from covpool.training.recipe_files import SHORT, flat, make_recipe, read_recipe

LOGGER = logging.getLogger("covpool")
# Names of a hundred thousand classes take 3 MB.
MAX_SUMMARY_BYTES = 64 << 20


def csv_bytes(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> bytes:
    """Return CSV: a line for the columns and one for each row.

    Example:
        >>> csv_bytes(["name", "loss"], [["a,b", 0.5]]).splitlines()
        [b'name,loss', b'"a,b",0.5']
    """
    return csv_text(chain([columns], rows)).encode(ENCODING, ERRORS)


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The files of a run. Only the first process writes them."""

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
        """JSON lines: some of the steps, and events."""
        return self.path / "log.jsonl"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's events."""
        return self.path / "tensorboard"

    def read_summary(self) -> dict[str, Any] | None:
        """Return the summary of a finished run; ``None`` if it is not finished.

        A damaged summary counts as none: the run resumes at its end, and writes it again.
        """
        file = self.path / "summary.json"
        try:
            summary: dict[str, Any] = parse(read_file(file, MAX_SUMMARY_BYTES), file.name, MAX_SUMMARY_BYTES)
        except FileNotFoundError:
            return None
        except BundleError as error:
            LOGGER.warning("%s is written again: %s", file, error)
            return None
        needed = {"finished", "fingerprints", "epochs", "metrics", "split"}
        return summary if summary.get("finished") and needed <= summary.keys() else None

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write or replace the summary."""
        replace_file(self.path / "summary.json", json_bytes(plain_json("summary", summary)))

    def write_metrics(self, history: Sequence[Mapping[str, Any]]) -> None:
        """Write a line per epoch."""
        names = dict.fromkeys(name for epoch in history for name in epoch)
        self._write_csv("metrics.csv", list(names), [[row.get(name) for name in names] for row in history])

    def write_bad_images(self, bad: Sequence[BadImage]) -> None:
        """Write the unreadable images so far."""
        self._write_csv("bad_images.csv", BadImage._fields, bad)

    def read_bad_images(self) -> list[BadImage]:
        """Read the unreadable images found before the run was resumed."""
        try:
            text = read_file(self.path / "bad_images.csv", MAX_TEXT_BYTES).decode(ENCODING, ERRORS)
        except FileNotFoundError:
            return []
        images = []
        with contextlib.suppress(csv.Error):  # the rest is damaged
            for row in csv.reader(io.StringIO(text, newline="")):
                if len(row) == len(BadImage._fields) and row != list(BadImage._fields):
                    images.append(BadImage(*map(from_cell, row)))
        return images

    def write_predictions(self, predictions: Predictions, images: ImageSet) -> None:
        """Write a line per image."""
        write_predictions(self.path / "predictions.csv", predictions, images)

    def append_log(self, line: Mapping[str, Any]) -> None:
        """Add a line to the log."""
        append_file(self.log, (json.dumps(plain_json("log", line)) + "\n").encode())

    def cut_log(self, step: int) -> None:
        """Remove the lines after a step, which will be repeated."""
        if not self.log.exists():
            return
        kept = []
        for line in read_file(self.log, MAX_FILE_BYTES).splitlines(keepends=True):
            # A kill left half a line, or the disk something else.
            with contextlib.suppress(ValueError, AttributeError, TypeError, RecursionError):
                if json.loads(line).get("step", 0) <= step:
                    kept.append(line.rstrip() + b"\n")
        replace_file(self.log, b"".join(kept))

    def _write_csv(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        replace_file(self.path / name, csv_bytes(columns, rows))


def write_predictions(path: Path, predictions: Predictions, images: ImageSet) -> None:
    """Write a CSV with a line per image."""
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
    replace_file(path, csv_bytes(columns, list(rows)))


class BadImages:
    """The images of ``bad_images.csv``, in every process."""

    def __init__(self, folder: RunFolder, processes: Processes, most: int) -> None:
        self.folder, self.processes, self.most = folder, processes, most
        self._known = {image.name: image for image in processes.by_first(folder.read_bad_images)}

    def __len__(self) -> int:
        return len(self._known)

    def note(self, images: Iterable[BadImage]) -> None:
        """Add the new ones to the file; every process must pass the same images.

        Raises:
            TrainingError: if there are too many.
        """
        new = {image.name: image for image in images if image.name not in self._known}
        if new:
            self._known |= new
            self.processes.by_first(lambda: self.folder.write_bad_images(list(self._known.values())))
        if len(self) > self.most:
            self.processes.fail(
                TrainingError(
                    f"{len(self)} images are unreadable, more than --max-bad {self.most}: "
                    f"{self.folder.path / 'bad_images.csv'} lists them"
                )
            )


# Keys that do not change the result. The data may have moved: fingerprints are compared.
FREE = {"loop.max_skips", "loop.device", "loop.timeout", "trackers", "out"}
FREE |= {f"data.{name}" for name in ("path", "layout", "workers", "cache", "max_bad")}
FREE |= {f"checkpoint.{name}" for name in ("steps", "minutes", "keep")}
# Values that a run fills in.
OPEN = {"model.dim": "auto", "model.keep_resolution": None, "model.features": None}


def as_begun(path: Path, recipe: Recipe) -> Recipe:
    """Return the recipe to resume the run whose recipe is at ``path``, which fills in open values.

    Raises:
        UsageError: if the recipes differ; the message lists the keys.
    """
    if not path.exists():
        return recipe
    if recipe.weights.pretrained:
        recipe = dataclasses.replace(recipe, model=pretrained_config(recipe.model))
    started = read_recipe(path)
    model = started.model.with_iteration()
    before = flat(dataclasses.replace(started, model=model))
    now = flat(dataclasses.replace(recipe, model=recipe.model.with_iteration(model.pool_options)))
    filled = {name for name, value in OPEN.items() if now[name] == value} | {"model.num_classes"}
    now |= {name: before[name] for name in filled}
    if differing := differences(before, now):
        raise UsageError(f"{path.parent} was started with {differing}: use the same values, or another --out")
    return make_recipe(now)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the keys that change the result and differ, as options with both values; empty if none does."""
    short = {key: name for name, key in SHORT.items()}
    return "; ".join(
        f"--{short.get(name, name).replace('_', '-')} {before[name]}, not {value}"
        for name, value in now.items()
        if name not in FREE and name in before and before[name] != value
    )
