"""The figures of an evaluation, and the table of its classes, from the predictions."""

from __future__ import annotations

from pathlib import Path

from covpool.data.image_set import ImageSet
from covpool.data.names import Names
from covpool.drawing.theme import LIGHT, png
from covpool.durable.replacing import replace_file
from covpool.evaluate.accuracy.class_figure import draw_classes
from covpool.evaluate.accuracy.reliability import draw_reliability
from covpool.evaluate.results import Results
from covpool.train.metrics import Predictions
from covpool.train.report.confusion import draw_confusion
from covpool.train.report.per_class import errors_by_pair, per_class, per_class_csv
from covpool.train.report.record import Predictions as NamedPredictions


def write_figures(folder: Path, results: Results, predictions: Predictions, images: ImageSet) -> None:
    """Write ``confusion.png``, ``per_class.png``, ``per_class.csv`` and ``reliability.png``."""
    named = _named(predictions, images)
    rows = per_class(named)
    figures = {
        "confusion": draw_confusion(named, errors_by_pair(named), LIGHT),
        "per_class": draw_classes(rows, LIGHT),
        "reliability": draw_reliability(results["metrics"], results["calibration"], LIGHT),
    }
    for name, figure in figures.items():
        replace_file(folder / f"{name}.png", png(figure))
    replace_file(folder / "per_class.csv", per_class_csv(rows))


def _named(predictions: Predictions, images: ImageSet) -> NamedPredictions:
    """As reports have them."""
    return NamedPredictions(
        images.classes,
        Names(images.name(i) for i in predictions.ids.tolist()),
        predictions.labels,
        predictions.predicted,
        predictions.confidence.astype(float),
        predictions.label_confidence.astype(float),
    )
