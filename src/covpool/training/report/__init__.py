"""The report of a run or a comparison: figures, a table of classes, and an HTML page with both."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import yaml
from numpy.typing import NDArray

from covpool.data.image_set import ImageSet
from covpool.drawing import LIGHT, png
from covpool.errors import UsageError
from covpool.models.model import PooledClassifier
from covpool.storage.files import replace_file
from covpool.storage.remote import rows_are_trusted
from covpool.training.metrics import METRICS
from covpool.training.report.figures import (
    SHOWN,
    curve_pictures,
    draw_confusion,
    draw_curves,
    draw_worst,
    picture,
)
from covpool.training.report.record import (
    PairedDifference,
    Predictions,
    RunRecord,
    errors_by_pair,
    per_class,
    per_class_csv,
    read_run,
    wilson,
)
from covpool.training.report.rendering import (
    duration,
    looks,
    most_confident_errors,
    number,
    percent,
    points,
    render,
    tiles,
)

SPLITS = {"train": "training", "val": "validation", "test": "test"}
# The titles of the metrics.
TITLES = {name: metric.title.capitalize() for name, metric in METRICS.items()} | {"loss": "Loss"}
Fact = tuple[str, str]
PAGE = "report.html"
# Thumbnails of errors, and of images that only one of two runs gets right.
WORST, EACH = 24, 12
# Up to AT_ONCE classes are listed; of more, the HARDEST ones.
AT_ONCE, HARDEST = 30, 20


def write_report(folder: Path, images: ImageSet | None = None, model: PooledClassifier | None = None) -> Path:
    """Write figures, ``per_class.csv`` and ``report.html`` into the folder of a run.

    Args:
        folder: the folder of the run.
        images: the images of ``predictions.csv``, for thumbnails.
        model: the model of the predictions, for maps of the evidence.
    """
    folder = Path(folder)
    run = read_run(folder)
    replace_file(folder / "curves.png", png(draw_curves({"": run}, LIGHT)))
    values = prediction_values(folder, run.predictions, images) if len(run.predictions) else {}
    page = folder / PAGE
    replace_file(
        page,
        render(
            "report.html.jinja",
            title=run_title(run.summary),
            split=SPLITS.get(run.summary.get("split") or "", ""),
            metrics=metrics(run.summary),
            metric_names=TITLES,
            metric_text=metric_text,
            commands=next_commands(folder),
            run=run,
            curves=curve_pictures({"": run}),
            found=values,
            looks=looks(run.predictions, images, model) if values and images is not None and model else [],
            facts=facts(run.summary),
            environment=environment(run.summary),
        ),
    )
    return page


def prediction_values(folder: Path, predictions: Predictions, images: ImageSet | None) -> dict[str, Any]:
    """Write the files about the predictions, and return the values for the page."""
    rows, errors = per_class(predictions), errors_by_pair(predictions)
    worst = tiles(predictions, most_confident_errors(predictions, WORST), images)
    replace_file(folder / "per_class.csv", per_class_csv(rows))
    replace_file(folder / "confusion.png", png(draw_confusion(predictions, errors, LIGHT)))
    replace_file(folder / "worst.png", png(draw_worst(worst, LIGHT), dpi=110))
    # By recall, as the bars show; classes without images come last.
    hardest = sorted(
        rows, key=lambda row: (math.inf if math.isnan(row.recall) else row.recall, row.f1, row.name)
    )
    first = HARDEST if len(rows) > AT_ONCE else len(rows)
    return {
        "images": len(predictions),
        "interval": wilson(int(predictions.right.sum()), len(predictions)),
        "hardest": hardest[:first],
        "others": hardest[first:],
        "confusion": picture(
            lambda theme: draw_confusion(predictions, errors, theme),
            "confusion matrix: true against predicted classes",
        ),
        "is_part": len(predictions.classes) > SHOWN,
        "classes": len(predictions.classes),
        "worst": worst,
        "wrong": len(predictions) - int(predictions.right.sum()),
    }


class Paired(NamedTuple):
    """The numbers of the images that both runs predicted, in the first run and in the second."""

    first: NDArray[np.int64]
    second: NDArray[np.int64]


def write_comparison(folder: Path, runs: Mapping[str, Path], images: ImageSet | None = None) -> Path:
    """Write ``report.html`` and ``curves.png`` of two runs into a folder.

    Args:
        folder: where the two files go; it is created if it does not exist.
        runs: the folders of two runs by name. Differences are the first minus the second.
        images: the images of ``predictions.csv``, for thumbnails.
    """
    if len(runs) != 2:
        raise UsageError(f"two runs can be compared; got {len(runs)}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    known = {name: read_run(Path(path)) for name, path in runs.items()}
    first, second = known.values()
    paired = pair(first.predictions, second.predictions)
    replace_file(folder / "curves.png", png(draw_curves(known, LIGHT)))
    page = folder / PAGE
    replace_file(
        page,
        render(
            "comparison.html.jinja",
            names=tuple(known),
            reports=[
                quote(os.path.relpath(Path(path) / PAGE, folder).replace(os.sep, "/"))
                for path in runs.values()
            ],
            commands=next_commands(_best_run(known, runs)),
            difference=_difference(first.predictions, second.predictions, paired),
            split=SPLITS.get(first.summary.get("split") or "", ""),
            metrics=_metrics(first, second),
            metric_text=metric_text,
            metric_difference=_metric_difference,
            unpaired=len(first.predictions) + len(second.predictions) - 2 * len(paired.first),
            curves=curve_pictures(known),
            disagreements=_disagreements(known, paired, images),
            recipes=_recipe_differences(first.recipe, second.recipe),
            facts=[facts(run.summary) for run in (first, second)],
            environments=[environment(run.summary) for run in (first, second)],
        ),
    )
    return page


def next_commands(folder: Path, data: str = "IMAGES") -> list[tuple[str, str]]:
    """Return the commands to type after a run, each with its purpose."""
    bundle, trusted = shlex.quote(str(folder / "bundle")), " --trust-rows" if rows_are_trusted() else ""
    return [
        ("classify photographs", f"covpool predict {bundle} PHOTO.jpg"),
        ("see the evidence for a class", f"covpool explain {bundle} PHOTO.jpg"),
        ("export to ONNX", f"covpool export {bundle} {shlex.quote(data)} --formats onnx{trusted}"),
    ]


def _best_run(known: Mapping[str, RunRecord], runs: Mapping[str, Path]) -> Path:
    """Return the folder of the run with the higher validation accuracy; the first of equal ones."""
    return Path(runs[max(known, key=lambda name: (known[name].summary["validation"] or {}).get("top1", 0.0))])


def pair(first: Predictions, second: Predictions) -> Paired:
    """Match images by name, if both runs give them the same class."""
    place = {name: number for number, name in enumerate(second.names)}
    pairs = [
        (number, place[name])
        for number, name in enumerate(first.names)
        if name in place and first.classes[first.labels[number]] == second.classes[second.labels[place[name]]]
    ]
    columns = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return Paired(columns[0], columns[1])


def _difference(first: Predictions, second: Predictions, paired: Paired) -> PairedDifference | None:
    if not len(paired.first):
        return None
    right, other_right = first.right[paired.first], second.right[paired.second]
    return PairedDifference(len(right), int((right & ~other_right).sum()), int((other_right & ~right).sum()))


def _metrics(first: RunRecord, second: RunRecord) -> list[tuple[str, str, Any, Any]]:
    """Return key, name and the two values of each metric that both have."""
    ours, theirs = metrics(first.summary), metrics(second.summary)
    return [
        (key, name, ours[key], theirs[key])
        for key, name in TITLES.items()
        if key in ours.keys() & theirs.keys()
    ]


def _metric_difference(key: str, first: float | None, second: float | None) -> str:
    if first is None or second is None:
        return points(None)
    return f"{first - second:+.3f}".replace("-", "−") if key == "loss" else points(first - second)


def _disagreements(
    runs: Mapping[str, RunRecord], paired: Paired, images: ImageSet | None
) -> list[dict[str, Any]]:
    """Return for each run the images that only it gets right, the largest differences first."""
    (first_name, first), (second_name, second) = runs.items()
    views = (
        (first_name, second_name, first.predictions, second.predictions, paired.first, paired.second),
        (second_name, first_name, second.predictions, first.predictions, paired.second, paired.first),
    )
    disagreements = []
    for name, other_name, mine, others, here, there in views:
        only = np.flatnonzero(mine.right[here] & ~others.right[there])
        ahead = mine.label_confidence[here[only]] - others.label_confidence[there[only]]
        chosen = only[np.argsort(-ahead, kind="stable")[:EACH]]
        shown = tiles(others, there[chosen], images)
        disagreements.append({"right": name, "wrong": other_name, "images": len(only), "tiles": shown})
    return disagreements


def _recipe_differences(first: str, second: str) -> list[tuple[str, str, str]]:
    """Return the settings in which two recipes differ, except the folder."""
    ours, theirs = _settings(yaml.safe_load(first)), _settings(yaml.safe_load(second))
    keys = sorted((ours.keys() | theirs.keys()) - {"out"})
    return [(key, ours.get(key, ""), theirs.get(key, "")) for key in keys if ours.get(key) != theirs.get(key)]


def _settings(value: Any, prefix: str = "") -> dict[str, str]:
    """Return the settings of a recipe by dotted key."""
    if not isinstance(value, dict):
        return {prefix: "null" if value is None else str(value)} if prefix else {}
    settings: dict[str, str] = {}
    for key, inner in value.items():
        settings |= _settings(inner, f"{prefix}.{key}" if prefix else str(key))
    return settings


def run_title(summary: Mapping[str, Any]) -> str:
    """Return the names of the network and its pooling."""
    return f"{summary.get('model', 'model')} · {summary.get('pool', 'pooling')}"


def metrics(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of the reported split by key; top-5 only for more than 5 classes."""
    known: Mapping[str, Any] = summary.get("metrics") or {}
    left_out = {"top5"} if len(summary["classes"]) <= 5 else set()
    return {key: known[key] for key in TITLES if key in known.keys() - left_out}


def metric_text(key: str, value: float | None) -> str:
    """Format a metric."""
    return number(value, 3) if key == "loss" else percent(value)


def facts(summary: Mapping[str, Any]) -> list[Fact]:
    """Return the lines on the network, the data and the duration of training."""
    images: Mapping[str, int] = summary.get("images") or {}
    size = summary.get("image_size")
    lines = [
        ("Network", str(summary.get("model", ""))),
        ("Pooling", _pooling(summary)),
        ("Parameters", number(summary.get("parameters"))),
        ("Image size", f"{size} px" if size else ""),
        ("Classes", number(len(summary["classes"]))),
        ("Images", ", ".join(f"{SPLITS.get(split, split)} {number(n)}" for split, n in images.items())),
        ("Epochs", _epochs(summary)),
        ("Steps", number(summary.get("steps"))),
        ("Time in training", duration(summary.get("seconds"))),
    ]
    if summary.get("bad_images"):
        lines.append(("Unusable images", f"{number(summary['bad_images'])} (bad_images.csv)"))
    if summary.get("skipped_steps"):
        lines.append(("Skipped steps", f"{number(summary['skipped_steps'])} (log.jsonl)"))
    return [fact for fact in lines if fact[1]]


def environment(summary: Mapping[str, Any]) -> list[Fact]:
    """Return the settings and versions needed to reproduce the run."""
    versions: Mapping[str, Any] = summary.get("versions") or {}
    lines = [
        ("Machine", str(summary.get("machine") or "")),
        ("Processes", number(summary["processes"]) if summary.get("processes") else ""),
        ("Seed", str(summary.get("seed", ""))),
        ("Commit", _commit(summary)),
        *((name, str(version)) for name, version in versions.items()),
    ]
    return [fact for fact in lines if fact[1]]


def _pooling(summary: Mapping[str, Any]) -> str:
    pool, dim = summary.get("pool"), summary.get("dim")
    return f"{pool}, {dim} channels" if pool and dim else str(pool or "")


def _epochs(summary: Mapping[str, Any]) -> str:
    epochs = number(summary.get("epochs"))
    if summary.get("validation") is None or summary.get("best_epoch") is None:
        return epochs
    return f"{epochs}, the best is {summary['best_epoch']}"


def _commit(summary: Mapping[str, Any]) -> str:
    source: Mapping[str, Any] = summary.get("source") or {}
    changed = ", with changes" if source.get("dirty") else ""
    return f"{source['commit'][:12]}{changed}" if source.get("commit") else ""


__all__ = ["write_comparison", "write_report"]
