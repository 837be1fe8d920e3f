"""The table and the page of ``covpool fit``, the labels to check, and the commands to type next.

The prediction of a training image comes from a solution without it. It contradicts the label the more, the
more probable it is relative to the label.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covpool.closed_form.options import FitOptions
from covpool.data.image_set import ImageFiles, ImageSet
from covpool.evaluate.probe.record import difference
from covpool.models.bundle import load_model
from covpool.models.card import versions
from covpool.provenance import machine_name
from covpool.storage.files import MAX_TEXT_BYTES, read_file, replace_file
from covpool.storage.remote import rows_are_trusted
from covpool.terminal import counted, duration
from covpool.training.metrics import Predictions
from covpool.training.report import PAGE, SPLITS, environment, next_commands, prediction_values
from covpool.training.report.rendering import Tile, looks, render, thumbnail
from covpool.training.run_folder import csv_bytes

LABELS = "labels.csv"
COLUMNS = ("path", "label", "split", "suggested", "probability")
# Images in the report.
SHOWN = 12


def write_page(
    folder: Path,
    record: dict[str, Any],
    predictions: Any,
    images: ImageSet,
    suspects: Suspects | None,
    *,
    is_tuned: bool,
) -> None:
    """Write ``report.html``."""
    model = load_model(folder / "bundle")
    data = record["arguments"]["data"]
    name = Path(data.rstrip("/")).name or data
    page = render(
        "fit.html.jinja",
        title=f"{name} · {record['model']} · {record['best']}{', fine-tuned' if is_tuned else ''}",
        record=record,
        split=SPLITS.get(record["split"], ""),
        found=prediction_values(folder, predictions, images),
        table=table_cells(record),
        over=next((head["over_gap"] for head in record["heads"] if head["head"] == record["best"]), None),
        # In cross-validation other classifiers made the predictions.
        looks=looks(predictions, images, model) if record["split"] in SPLITS else [],
        commands=commands(data, folder, record),
        suspects=[] if suspects is None else suspects.tiles(),
        correct=correction(folder, record),
        facts=[
            ("Network", record["model"]),
            ("Images", ", ".join(f"{SPLITS[split]} {n:,}" for split, n in record["images"].items())),
            ("Classes", f"{len(images.classes):,}"),
            *environment({**record, "machine": machine_name(record["machine"]), "versions": versions()}),
        ],
    )
    replace_file(folder / PAGE, page)


def table_cells(record: dict[str, Any]) -> list[list[str]]:
    """Return titles, and a row for each head and for fine-tuning."""
    rows = [["head", "classifier", "held-out in %", "top-1 in %", "over gap (95 % interval)"]]
    for head in record["heads"]:
        solver = head["solver"] if head["seeds"] is None else f"trained, {counted(head['seeds'], 'seed')}"
        accuracies = [f"{100 * head[name]:.1f}" for name in ("held_out", "top1")]
        rows.append([head["head"], solver, *accuracies, difference(head["over_gap"])])
    if tuned := record["finetuned"]:
        rows.append([f"{tuned['head']}, fine-tuned", "trained", "", f"{100 * tuned['top1']:.1f}", ""])
    return rows


def commands(data: str, folder: Path, record: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the commands to type next, each with its purpose."""
    lines = next_commands(folder, data)
    if record["finetuned"] is None:
        purpose, seconds = "fine-tune the whole network", record["finetune_seconds"]
        if seconds is not None:
            purpose += f", about {duration(seconds)} on this machine"
        words = ["covpool", "fit", data, "--out", str(folder), *_given(record["arguments"]), "--finetune"]
        words += ["--trust-rows"] if rows_are_trusted() else []
        lines.append((purpose, shlex.join(words)))
    return lines


def correction(folder: Path, record: dict[str, Any]) -> str:
    """Return the command that fits again to corrected labels; empty if there is no table of labels."""
    if not (folder / LABELS).exists():
        return ""
    out = folder.with_name(f"{folder.name}-corrected")
    words = ["covpool", "fit", str(folder / LABELS), "--trust-rows", "--out", str(out)]
    return shlex.join([*words, *_given(record["arguments"])])


def _given(arguments: dict[str, Any]) -> list[str]:
    """Return the options that differ from their defaults, as words of a command line."""
    words = []
    for name, default in asdict(FitOptions()).items():
        value = tuple(arguments[name]) if name == "heads" else arguments[name]  # a list in results.json
        if value != default and name not in ("finetune", "device", "workers"):
            words.append(f"--{name.replace('_', '-')}")
            if value is not True:
                words.append(value if isinstance(value, str) else _word(value))
    return words


def _word(value: Any) -> str:
    return ",".join(value) if isinstance(value, list | tuple) else json.dumps(value)


def _labels(table: bytes) -> set[tuple[str, ...]]:
    """Return paths and labels of a table."""
    rows = csv.reader(io.StringIO(table.decode("utf-8", "surrogateescape"), newline=""))
    return {tuple(row[:2]) for row in rows}


@dataclass(frozen=True, eq=False)
class Suspects:
    """Training images that a solution without them assigns to another class, the most doubtful first.

    Attributes:
        images: the training images.
        held_out: their predictions, each by a solution that has not seen the image.
    """

    images: ImageSet
    held_out: Predictions

    @property
    def order(self) -> NDArray[np.int64]:
        """The numbers of the rows of ``held_out``, the largest ratio of the two probabilities first."""
        wrong = np.flatnonzero(self.held_out.labels != self.held_out.predicted)
        tiny = np.finfo(np.float32).tiny
        ratio = self.held_out.confidence[wrong] / np.maximum(self.held_out.label_confidence[wrong], tiny)
        return wrong[np.argsort(-ratio, kind="stable")]

    def tiles(self) -> list[Tile]:
        """Return the first of them, with pictures."""
        classes, held_out = self.images.classes, self.held_out
        return [
            Tile(
                self.images.name(int(held_out.ids[i])),
                classes[held_out.labels[i]],
                classes[held_out.predicted[i]],
                float(held_out.confidence[i]),
                thumbnail(self.images, int(held_out.ids[i])),
            )
            for i in self.order[:SHOWN].tolist()
        ]

    def write_table(self, sets: Mapping[str, ImageSet], folder: Path, log: Callable[[str], None]) -> None:
        """Write all images and their labels, these first. A table with corrected labels is kept."""
        if not all(isinstance(images, ImageFiles) for images in sets.values()):
            return
        table, file = csv_bytes(COLUMNS, list(self._rows(sets))), folder / LABELS
        if file.exists() and _labels(before := read_file(file, MAX_TEXT_BYTES)) != _labels(table):
            numbers = (folder / f"labels-{number}.csv" for number in itertools.count(1))
            kept = next(path for path in numbers if not path.exists())
            replace_file(kept, before)
            log(f"    {file} had other labels: that table is now {kept}")
        replace_file(file, table)

    def _rows(self, sets: Mapping[str, ImageSet]) -> Iterator[Sequence[object]]:
        classes, held_out, order = self.images.classes, self.held_out, self.order
        for i in order.tolist():
            suggested, sure = classes[held_out.predicted[i]], f"{held_out.confidence[i]:.3f}"
            yield *_named(self.images, int(held_out.ids[i])), "train", suggested, sure
        doubted = set(held_out.ids[order].tolist())
        for split, images in sets.items():
            for i in range(len(images)):
                if split != "train" or i not in doubted:
                    yield *_named(images, i), split, "", ""


def _named(images: ImageSet, i: int) -> tuple[str, str]:
    assert isinstance(images, ImageFiles)
    return os.path.abspath(os.path.join(images.root, images.name(i))), images.classes[images.label(i)]
