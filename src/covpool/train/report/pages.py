"""Write report.html for one run or for a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray

from covpool.data.image_set import ImageSet
from covpool.drawing import LIGHT, png
from covpool.durable import replace_file
from covpool.errors import UsageError
from covpool.models.model import PooledClassifier
from covpool.train.report.figures import SHOWN, curve_pictures, draw_confusion, draw_curves, looks
from covpool.train.report.page import (
    METRICS,
    SPLITS,
    environment,
    facts,
    metric_text,
    metrics,
    picture,
    points,
    render,
    run_title,
)
from covpool.train.report.per_class import (
    ClassRow,
    PairedDifference,
    draw_worst,
    errors_by_pair,
    per_class,
    per_class_csv,
    wilson,
)
from covpool.train.report.record import Predictions, RunRecord, read_run
from covpool.train.report.thumbnails import most_confident_errors, tiles

PAGE = "report.html"
# Errors with a thumbnail; classes that are listed at once, and how many of more than these before one asks.
WORST, AT_ONCE, HARDEST = 24, 30, 20


def write_report(folder: Path, images: ImageSet | None = None, model: PooledClassifier | None = None) -> Path:
    """Write figures, ``per_class.csv`` and ``report.html`` into a run's folder, from the other files there.

    Args:
        folder: of the run.
        images: those of ``predictions.csv``, for thumbnails.
        model: that made the predictions, for maps of what speaks for a class.

    Returns:
        The path of ``report.html``.
    """
    folder = Path(folder)
    run = read_run(folder)
    replace_file(folder / "curves.png", png(draw_curves({"": run}, LIGHT)))
    values = _of_predictions(folder, run.predictions, images) if len(run.predictions) else {}
    page = folder / PAGE
    replace_file(
        page,
        render(
            "report.html.jinja",
            title=run_title(run.summary),
            split=SPLITS.get(run.summary.get("split") or "", ""),
            metrics=metrics(run.summary),
            metric_names=METRICS,
            metric_text=metric_text,
            run=run,
            curves=curve_pictures({"": run}),
            found=values,
            looks=looks(run.predictions, images, model) if values and images is not None and model else [],
            facts=facts(run.summary),
            environment=environment(run.summary),
        ),
    )
    return page


def _of_predictions(folder: Path, predictions: Predictions, images: ImageSet | None) -> dict[str, Any]:
    """What is only there if images were set aside to measure the model by."""
    rows, errors = per_class(predictions), errors_by_pair(predictions)
    worst = tiles(predictions, most_confident_errors(predictions, WORST), images)
    replace_file(folder / "per_class.csv", per_class_csv(rows))
    replace_file(folder / "confusion.png", png(draw_confusion(predictions, errors, LIGHT)))
    replace_file(folder / "worst.png", png(draw_worst(worst, LIGHT), dpi=110))
    hardest = sorted(rows, key=_hardness)
    first = HARDEST if len(rows) > AT_ONCE else len(rows)
    return {
        "images": len(predictions),
        "interval": wilson(int(predictions.right.sum()), len(predictions)),
        "hardest": hardest[:first],
        "others": hardest[first:],
        "confusion": picture(
            lambda theme: draw_confusion(predictions, errors, theme),
            "table of what images are against what they were taken for",
        ),
        "is_part": len(predictions.classes) > SHOWN,
        "worst": worst,
        "wrong": len(predictions) - int(predictions.right.sum()),
    }


def _hardness(row: ClassRow) -> tuple[float, str]:
    """Classes without images, of which nothing is known, come last."""
    return (math.inf if math.isnan(row.recall) else row.f1), row.name


# Thumbnails of images that only one of the two gets right.
EACH = 12


class Paired(NamedTuple):
    """The images that both runs were measured by.

    Attributes:
        first: their numbers among the predictions of the first run.
        second: the same images' numbers among those of the second.
    """

    first: NDArray[np.int64]
    second: NDArray[np.int64]


def write_comparison(folder: Path, runs: Mapping[str, Path], images: ImageSet | None = None) -> Path:
    """Write ``report.html`` and ``curves.png`` of two runs into a folder.

    Args:
        folder: for the two files; it is made if there is none.
        runs: the folders of two runs, by the names they have in the report. Differences are of the first
            less the second.
        images: those of the runs' ``predictions.csv``, for thumbnails.

    Returns:
        The path of ``report.html``.
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
            runs=(first, second),
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


def pair(first: Predictions, second: Predictions) -> Paired:
    """The images that both have, by their names, if both say that they are of the same class."""
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
    one, other = first.right[paired.first], second.right[paired.second]
    return PairedDifference(len(one), int((one & ~other).sum()), int((other & ~one).sum()))


def _metrics(first: RunRecord, second: RunRecord) -> list[tuple[str, str, Any, Any]]:
    """Key, name and the two values of each metric that both have."""
    one, other = metrics(first.summary), metrics(second.summary)
    return [
        (key, name, one[key], other[key]) for key, name in METRICS.items() if key in one.keys() & other.keys()
    ]


def _metric_difference(key: str, first: float | None, second: float | None) -> str:
    if first is None or second is None:
        return points(None)
    return f"{first - second:+.3f}".replace("-", "−") if key == "loss" else points(first - second)


def _disagreements(
    runs: Mapping[str, RunRecord], paired: Paired, images: ImageSet | None
) -> list[dict[str, Any]]:
    """For each run, images that it alone gets right, those first on which it is furthest ahead."""
    (first_name, first), (second_name, second) = runs.items()
    views = (
        (first_name, second_name, first.predictions, second.predictions, paired.first, paired.second),
        (second_name, first_name, second.predictions, first.predictions, paired.second, paired.first),
    )
    found = []
    for name, other_name, mine, others, here, there in views:
        only = np.flatnonzero(mine.right[here] & ~others.right[there])
        ahead = mine.label_confidence[here[only]] - others.label_confidence[there[only]]
        chosen = only[np.argsort(-ahead, kind="stable")[:EACH]]
        shown = tiles(others, there[chosen], images)
        found.append({"right": name, "wrong": other_name, "images": len(only), "tiles": shown})
    return found


def _recipe_differences(first: str, second: str) -> list[tuple[str, str, str]]:
    """The settings in which two recipes differ, where the run's folder is none."""
    one, other = _settings(yaml.safe_load(first)), _settings(yaml.safe_load(second))
    keys = sorted((one.keys() | other.keys()) - {"out"})
    return [(key, one.get(key, ""), other.get(key, "")) for key in keys if one.get(key) != other.get(key)]


def _settings(value: Any, prefix: str = "") -> dict[str, str]:
    """What a recipe sets, by dotted keys."""
    if not isinstance(value, dict):
        return {prefix: "null" if value is None else str(value)} if prefix else {}
    found: dict[str, str] = {}
    for key, inner in value.items():
        found |= _settings(inner, f"{prefix}.{key}" if prefix else str(key))
    return found
