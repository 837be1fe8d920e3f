"""The report of one run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from covpool.data.image_set import ImageSet
from covpool.drawing.theme import LIGHT, png
from covpool.durable.replacing import replace_file
from covpool.models.model import PooledClassifier
from covpool.train.report.confusion import SHOWN, draw_confusion
from covpool.train.report.curves import curve_pictures, draw_curves
from covpool.train.report.facts import METRICS, SPLITS, environment, facts, metric_text, metrics, run_title
from covpool.train.report.intervals import wilson
from covpool.train.report.looks import looks
from covpool.train.report.page import picture, render
from covpool.train.report.per_class import ClassRow, errors_by_pair, per_class, per_class_csv
from covpool.train.report.record import Predictions, read_run
from covpool.train.report.thumbnails import most_confident_errors, tiles
from covpool.train.report.worst import draw_worst

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
