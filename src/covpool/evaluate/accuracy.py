"""Measure the accuracy of a bundle with confidence intervals, per class, and its calibration."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from covpool.arguments import Device, check_choice, check_whole
from covpool.data.image_set import ImageSet
from covpool.data.loader import BadImage
from covpool.data.sources import evaluation_split
from covpool.evaluate.results import (
    Results,
    begin_results,
    describe_images,
    new_results,
    prepare_folder,
    write_results,
)
from covpool.inference.forward import VIEWS, Pass, ProgressCall, Views, open_bundle, open_split
from covpool.processes import joined_processes
from covpool.terminal import counted
from covpool.training.metrics import METRICS, Counts, Predictions, measure, predict
from covpool.training.run_folder import RunFolder

RESAMPLES = 2000
LEVEL = 0.95
# Number of values in the largest array of a block of resamples.
BLOCK = 1 << 22

Column = NDArray[np.float64]


def intervals(
    predictions: Predictions, classes: int, seed: int, resamples: int = RESAMPLES
) -> dict[str, tuple[float, float]]:
    """Return a 95 % bootstrap interval of each accuracy metric, by name.

    The calibration error has none. Chance gaps between confidence and accuracy add up in every resample, so
    its bootstrap interval would lie above the true value: it excluded 0 for calibrated predictions.
    """
    n = len(predictions.ids)
    terms_Fn = _terms(predictions, classes)
    random = np.random.default_rng(seed)
    rows = max(1, BLOCK // max(terms_Fn.shape))
    parts = []
    for start in range(0, resamples, rows):
        weights_Rn = _weights(random, min(rows, resamples - start), n)
        parts.append(_metrics(terms_Fn @ weights_Rn.T, n, classes))
    tail = 50 * (1 - LEVEL)
    ends = {
        name: np.percentile(np.concatenate([part[name] for part in parts]), (tail, 100 - tail))
        for name in parts[0]
    }
    return {name: (float(low), float(high)) for name, (low, high) in ends.items()}


def _weights(random: np.random.Generator, rows: int, n: int) -> Column:
    """Return how often each of ``n`` images is drawn in each of ``rows`` resamples."""
    drawn = random.integers(n, size=(rows, n)) + n * np.arange(rows)[:, None]
    return np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n).astype(np.float64)


def _terms(predictions: Predictions, classes: int) -> sparse.csr_array:
    """Return the terms of each image: correct, in the top 5, and three counts of its class."""
    n, labels, predicted = len(predictions.ids), predictions.labels, predictions.predicted
    right = (labels == predicted).astype(np.float64)
    ones, zeros = np.ones(n), np.zeros(n, dtype=np.int64)
    first = 2 + classes * np.arange(3)
    added = [
        (zeros, right),
        (zeros + 1, predictions.in_top5.astype(np.float64)),
        (first[0] + labels, right),
        (first[1] + labels, ones),
        (first[2] + predicted, ones),
    ]
    rows, values = (np.concatenate(column) for column in zip(*added, strict=True))
    images = np.tile(np.arange(n), len(added))
    return sparse.csr_array((values, (rows, images)), shape=(2 + 3 * classes, n))


def _metrics(sums_FR: Column, n: int, classes: int) -> dict[str, Column]:
    """Return the metrics of each resample."""
    counts = Counts(n, sums_FR[0], sums_FR[1], *sums_FR[2:].reshape(3, classes, -1))
    return {name: metric.of(counts) for name, metric in METRICS.items()}


BINS = 15


@dataclass(frozen=True)
class Calibration:
    """Calibration of the confidences, in 15 bins of equal width; fractions from 0 to 1.

    Attributes:
        expected_error: ECE, the mean gap between accuracy and mean confidence, weighted by images per bin.
        maximum_error: the largest gap of a bin.
        images: the number of images per bin; a bin includes its upper end.
        confidence: the mean confidence per bin; ``None`` for an empty bin.
        accuracy: the accuracy per bin; ``None`` for an empty bin.
    """

    expected_error: float
    maximum_error: float
    images: tuple[int, ...]
    confidence: tuple[float | None, ...]
    accuracy: tuple[float | None, ...]


def bin_of(confidence: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the bin of each confidence; a bin includes its upper end, so that 1.0 is in the last."""
    ends = np.linspace(0, 1, BINS + 1)[1:-1]
    return np.digitize(confidence, ends, right=True)


def calibrate(predictions: Predictions) -> Calibration:
    """Return the calibration of the predictions of at least one image."""
    place = bin_of(predictions.confidence)
    right = predictions.labels == predictions.predicted
    images = np.bincount(place, minlength=BINS)
    confidence = np.bincount(place, weights=predictions.confidence.astype(np.float64), minlength=BINS)
    accuracy = np.bincount(place, weights=right.astype(np.float64), minlength=BINS)
    gaps = np.abs(accuracy - confidence)
    filled = images > 0
    return Calibration(
        expected_error=float(gaps.sum() / images.sum()),
        maximum_error=float((gaps[filled] / images[filled]).max()),
        images=tuple(images.tolist()),
        confidence=_means(confidence, images),
        accuracy=_means(accuracy, images),
    )


def _means(sums: NDArray[Any], images: NDArray[Any]) -> tuple[float | None, ...]:
    return tuple(
        total / count if count else None for total, count in zip(sums.tolist(), images.tolist(), strict=True)
    )


TITLES = {
    **{name: metric.title for name, metric in METRICS.items()},
    "expected_calibration_error": "calibration error (ECE)",
    "maximum_calibration_error": "  largest of a bin",
}


def results_table(results: Results) -> str:
    """Return one line per metric in percent, with its interval if it has one, and the loss."""
    data = results["data"]
    title = f"{counted(results['images'], 'image')} of {data['split']}, {counted(data['classes'], 'class')}"
    lines = [title, "", f"{'':<25} {'%':>6}   95 % interval"]
    for key, name in TITLES.items():
        if key == "top5" and data["classes"] <= 5:
            continue  # always 100 %
        line = f"{name:<25} {100 * results['metrics'][key]:6.1f}"
        if key in results["intervals"]:
            low, high = results["intervals"][key]
            line += f"   {100 * low:5.1f} to {100 * high:5.1f}"
        lines.append(line)
    return "\n".join([*lines, f"{'loss':<25} {results['metrics']['loss']:6.3f}"])


PROTOCOL = "accuracy"


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        folder: folder of the output files, including ``results.json``.
        results: contents of ``results.json``; ``metrics`` and ``intervals`` are fractions from 0 to 1.
        predictions: predictions of every readable image.
        images: the evaluated images.
    """

    folder: Path
    results: Results
    predictions: Predictions
    images: ImageSet


def measure_accuracy(
    bundle: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    split: str | None = None,
    layout: str = "auto",
    views: Views = "one",
    batch_size: int = 64,
    workers: int = 2,
    device: Device = "auto",
    precision: Literal["float32", "bfloat16", "float16"] = "float32",
    seed: int = 0,
    progress: ProgressCall | None = None,
) -> Evaluation:
    """Evaluate a bundle on the images of a split, and write the results to a folder.

    Under torchrun all processes call this function and share the images. Unreadable images are left out and
    listed.

    Args:
        bundle: folder written by :func:`covpool.save_model`.
        data: images of the bundle's classes; see :func:`covpool.data.sources.open_images`.
        out: a new folder, or that of an earlier evaluation.
        split: split of the data (default: test, else val, else all images).
        layout: format of the data, as for :func:`covpool.data.sources.open_images`.
        views: ``"one"``, ``"flip"`` for an image and its horizontal flip, or ``"ten-crop"``; logits are
            averaged.
        batch_size: batch size per process.
        workers: number of processes that read images, for each process of torchrun.
        device: one of :data:`covpool.device.DEVICES`; ``"auto"`` is a GPU if there is one.
        precision: autocast precision.
        seed: seed of the bootstrap.
        progress: called with the number of images done and the total.

    Raises:
        ValueError: if bundle, images and options do not match.
    """
    bundle, data, folder = str(bundle), str(data), Path(out)
    check_choice("views", views, VIEWS)
    check_whole("seed", seed, at_least=0)
    passing = Pass(batch_size, workers, precision, progress)
    arguments = {"bundle": bundle, "data": data, "layout": layout, "views": views, **passing.described()}
    with joined_processes(device) as processes:
        started = time.monotonic()
        processes.by_first(lambda: prepare_folder(folder, PROTOCOL, data))
        model = processes.together(lambda: open_bundle(bundle, processes.device))
        chosen = split or processes.together(lambda: evaluation_split(data, layout))
        images = processes.together(lambda: open_split(model, data, chosen, layout))
        outcome = predict(passing.run(model, images, processes, views=views), processes)
        assert outcome is not None  # this loop is never interrupted
        predictions, bad = outcome

        def finish() -> Results:
            results = new_results(PROTOCOL, arguments, processes, seed)
            results["data"] = describe_images(images, chosen)
            results |= _measured(predictions, len(images.classes), seed)
            results |= {"bad_images": len(bad), "seconds": time.monotonic() - started}
            _write(folder, results, predictions, images, bad)
            return results

        return Evaluation(folder, processes.by_first(finish), predictions, images)


def _measured(predictions: Predictions, classes: int, seed: int) -> dict[str, Any]:
    metrics = measure(predictions, classes)
    calibration = asdict(calibrate(predictions))
    for name in ("expected", "maximum"):
        metrics[f"{name}_calibration_error"] = calibration.pop(f"{name}_error")
    return {
        "images": metrics.pop("images"),
        "metrics": metrics,
        "intervals": intervals(predictions, classes, seed),
        "bootstrap": {"resamples": RESAMPLES, "level": LEVEL},
        "calibration": calibration,
    }


def _write(
    folder: Path, results: Results, predictions: Predictions, images: ImageSet, bad: list[BadImage]
) -> None:
    """Write all files; ``results.json`` is last, so it exists only if the folder is complete."""
    from covpool.evaluate.figures import write_figures  # here: matplotlib takes seconds to import

    begin_results(folder, PROTOCOL)
    files = RunFolder(folder)
    files.write_predictions(predictions, images)
    files.write_bad_images(bad)
    write_figures(folder, results, predictions, images)
    write_results(folder, results)
