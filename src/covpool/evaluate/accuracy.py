"""Measure the accuracy of a bundle with confidence intervals, per class, and its calibration."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from covpool.data.image_set import ImageSet
from covpool.data.loader import BadImage
from covpool.data.sources import evaluation_split
from covpool.device import Device
from covpool.evaluate.results import (
    Results,
    begin_results,
    describe_images,
    new_results,
    prepare_folder,
    write_results,
)
from covpool.evaluate.statistics import LEVEL, RESAMPLES, calibrate, intervals
from covpool.functional.arguments import check_choice, check_whole
from covpool.inference.forward import VIEWS, Pass, ProgressCall, Views, open_bundle, open_split
from covpool.processes import joined_processes
from covpool.terminal import counted
from covpool.training.metrics import METRICS, Predictions, measure, predict
from covpool.training.run_folder import RunFolder

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
        images: the set.
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
        layout: layout of the data.
        views: ``"one"``, ``"flip"`` for an image and its horizontal flip, or ``"ten-crop"``; logits are
            averaged.
        batch_size: batch size per process.
        workers: number of image-reading processes per process.
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
        found = predict(passing.run(model, images, processes, views=views), processes)
        assert found is not None  # this loop is never interrupted
        predictions, bad = found

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
