"""Compare the time of ``covpool fit`` with a bare pass of decoding and backbone over the same images.

    python -m lab fit_time SETS          # minutes on two idle cores

Both run in this process, in turn: the same images, batches, workers and precision. The bare pass decodes and
runs the backbone, and does nothing with the features. The fit pools, solves, predicts the test images and
writes its report.
"""

from __future__ import annotations

import logging
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import covpool
from covpool.closed_form.options import FitOptions
from covpool.data.sources import open_splits
from covpool.data.transforms import Preprocessing
from covpool.inference import Running
from covpool.inference.forward import Forward, prepare
from covpool.inference.work import Decoder, decoded_batches, divide
from lab.bench.table import table
from lab.record import RESULTS, new_record, record_file, write_record

NAME = "fit_time"


def bare_pass(data: Path, options: FitOptions) -> float:
    """Return the seconds of decoding all images and running the backbone on them."""
    model = prepare(
        covpool.create_model(options.probe().model, pool="gap", num_classes=0, pretrained=True),
        torch.device("cpu"),
    )
    preprocessing = Preprocessing.of(model.pretrained_cfg)
    forward = Forward(
        model,
        lambda batch: {"features": model.forward_features(batch)},
        device=torch.device("cpu"),
        preprocessing=preprocessing,
    )
    running = Running(options.batch_size, options.workers)
    started = time.perf_counter()
    for images in open_splits(str(data), "auto").values():
        for _, batch in decoded_batches(images, divide(images, 256), Decoder(preprocessing), running):
            forward(batch["image"])
    return time.perf_counter() - started


def fit_pass(data: Path, options: FitOptions, folder: Path) -> tuple[float, dict[str, float]]:
    """Return the seconds of a fit, and the seconds at which its stages begin."""
    started = time.perf_counter()
    stages: dict[str, float] = {}

    def note(line: str) -> None:
        stages[line[:12]] = time.perf_counter() - started

    covpool.fit(data, folder, options, log=note)
    return time.perf_counter() - started, stages


def main(sets: Path, out: Path = RESULTS, rounds: int = 5) -> Path:
    """Time covpool fit on the sparrows against a bare pass, in turn.

    Args:
        sets: folder with sparrows, which has train and test by class.
        out: results folder.
        rounds: rounds of one fit and one bare pass each.
    """
    logging.getLogger("covpool").setLevel(logging.ERROR)
    data, options = sets / "sparrows", FitOptions()
    record: dict[str, Any] = new_record(NAME, ("closed_form", "inference", "lab/bench"), {"rounds": rounds})
    timings = []
    for turn in range(rounds + 1):
        folder = Path(tempfile.mkdtemp()) / "fit"
        bare, (fit, stages) = bare_pass(data, options), fit_pass(data, options, folder)
        shutil.rmtree(folder.parent)
        print(f"bare {bare:.1f} s, fit {fit:.1f} s, ratio {fit / bare:.2f}, {stages}", flush=True)
        if turn:  # the first one warms up
            timings.append({"bare": bare, "fit": fit, "stages": stages})
    ratio = statistics.median(timing["fit"] / timing["bare"] for timing in timings)  # type: ignore[operator]
    record |= {"timings": timings, "ratio": ratio}
    file = record_file(record, out)
    write_record(file, record, summary(record))
    print(file)
    return file


def summary(record: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    cells = [
        [
            str(number),
            f"{timing['bare']:.1f}",
            f"{timing['fit']:.1f}",
            f"{timing['fit'] / timing['bare']:.2f}",
        ]
        for number, timing in enumerate(record["timings"], 1)
    ]
    return "\n".join(
        [
            "`covpool fit` on the sparrows (1,244 images), and a bare pass: decoding and the backbone alone.",
            "",
            table(["round", "bare pass, s", "fit, s", "ratio"], cells),
            "",
            f"Median ratio: {record['ratio']:.2f}.",
        ]
    )
