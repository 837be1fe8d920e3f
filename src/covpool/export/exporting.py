"""Export a bundle, compare the exported files with the model, and write a report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from covpool.errors import ExportRefusedError, UsageError
from covpool.evaluate.results import Results
from covpool.export import ExportOptions
from covpool.export.export_results import METADATA, describe, prepare_export, write_export_results
from covpool.export.graph import (
    Array,
    Runner,
    Traced,
    example,
    may_have_free_size,
    torch_runner,
    trace,
)
from covpool.export.job import CPU, Job, Progress, open_job
from covpool.export.parity import Latency, Parity, compare, measure_latency
from covpool.export.targets import TARGETS, Exportable
from covpool.inference.forward import Forward
from covpool.storage.files import json_bytes, write_file
from covpool.storage.folders import replace_folder, resolved
from covpool.terminal import Progresses, silent

EAGER, COMPILED = "torch eager", "torch.compile"
# Heights and widths, relative to the image size, that a graph with dynamic size is tested on.
OTHER_SIZES = ((1.2, 1.2), (2.3, 1.5), (0.6, 0.8))


@dataclass(frozen=True, eq=False)
class ExportReport:
    """The exported files, and how they compare with the model.

    Attributes:
        folder: contains the files, ``model.json`` with their metadata, and ``results.json``.
        results: the content of ``results.json``.
        parity: agreement of each file with torch, by format.
        latency: latency of each file and of torch, by format or name.
    """

    folder: Path
    results: Results
    parity: dict[str, Parity]
    latency: dict[str, Latency]


def export_model(
    bundle: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    options: ExportOptions | None = None,
    force: bool = False,
    progress: Progresses = silent,
) -> ExportReport:
    """Export a bundle, and compare every file with the bundle on images.

    If a file differs too much from the bundle, nothing is written and ``out`` stays as it was.

    Args:
        bundle: folder of a trained model with a classifier.
        data: images of the bundle's classes, to compare the files on.
        out: new folder, or the folder of an earlier export, which is replaced.
        options: formats, and settings of the comparison.
        force: keep files that differ too much from the bundle.
        progress: maps a label to a context manager of a callable that receives done and total.

    Raises:
        ExportRefusedError: a file differs too much from the bundle.
        UsageError: bundle, images and options do not fit together.
    """
    options, out = options or ExportOptions(), Path(out)
    prepare_export(out)
    job = open_job(bundle, data, options)
    with progress("graphs traced") as bar:
        bar(0, 1)  # tracing may take a minute
        traced = trace_model(job)
    described = describe(job, traced)
    with replace_folder(resolved(out)) as folder:
        write_files(job, traced, folder, described, progress)
        write_file(folder / METADATA, json_bytes(described))
        runners = {target.name: target.load(folder / target.file) for target in options.targets}
        with progress("images") as bar:
            parity, first = compare_files(job, runners, bar)
        texts = [TARGETS[name].objection(one_parity) for name, one_parity in parity.items()]
        objections = [sentence for sentence in texts if sentence is not None]
        if objections and not force:
            raise ExportRefusedError(
                f"{objections[0]}. No file was written; --force true writes the files anyway."
            )
        if traced.has_free_size and not force:
            _check_sizes(job, runners)
        runners[EAGER] = torch_runner(job.graph)
        if options.compile:
            runners[COMPILED] = torch_runner(torch.compile(job.graph))
        with progress("rounds") as bar:
            latency = measure_latency(runners, first, options.rounds, progress=bar)
        results = write_export_results(job, traced, folder, parity, latency, objections)
    return ExportReport(out, results, parity, latency)


def trace_model(job: Job) -> Traced:
    """Trace the model, with dynamic image size if requested and if a test at other sizes passes."""
    size = job.preprocessing.size
    traced = trace(job.graph, size, free_size=job.options.free_size and may_have_free_size(job.model))
    if traced.has_free_size and not takes_other_sizes(job, torch_runner(traced.program.module())):
        traced = trace(job.graph, size, free_size=False)
    return traced


def write_files(
    job: Job, traced: Traced, folder: Path, described: Mapping[str, object], progress: Progresses
) -> None:
    """Write the file of every target, with its metadata as one JSON string per key."""
    targets = job.options.targets

    def calibration() -> list[Array]:
        assert job.calibration is not None
        return [images for _, images in job.batches(job.calibration, lambda done, total: None)]

    model = Exportable(traced, calibration, progress)
    for done, target in enumerate(targets):
        metadata = {**described, "precision": target.precision}
        strings = {name: json.dumps(value, ensure_ascii=False) for name, value in metadata.items()}
        write = partial(target.write, model, folder / target.file, strings)
        with progress(f"files: {target.file}") as bar:
            bar(done, len(targets))
            if not target.needs_calibration:
                write()
        if target.needs_calibration:  # it shows its own progress
            write()


def compare_files(
    job: Job, runners: Mapping[str, Runner], progress: Progress
) -> tuple[dict[str, Parity], Array]:
    """Compare every file with torch on all images; also return the first image, as the files receive it."""
    reference: list[Array] = []
    outputs: dict[str, list[Array]] = {name: [] for name in runners}
    forward, first = Forward(job.model, device=CPU, preprocessing=job.preprocessing), None
    for pixels, images in job.batches(job.images, progress):
        reference.append(forward(pixels)["logits"][0].numpy())
        first = images[:1] if first is None else first
        for name, run in runners.items():
            outputs[name].append(run(images))
    if first is None:
        raise UsageError(f"no image of the split {job.split} is readable: run covpool check to see why")
    logits = np.concatenate(reference)
    if not np.isfinite(logits).all():
        raise UsageError("the logits of the bundle are not finite on these images: train it again")
    return {name: compare(logits, np.concatenate(parts)) for name, parts in outputs.items()}, first


def takes_other_sizes(job: Job, run: Runner) -> bool:
    """Return whether a runner gives the model's logits for images of other sizes."""
    tolerance = TARGETS["torch"].tolerance.relative
    assert tolerance is not None
    size = job.preprocessing.size
    for height, width in OTHER_SIZES:
        images = example(job.graph, 1, round(height * size), round(width * size)).numpy()
        try:
            logits = run(images)
        except Exception:  # any layer may refuse the size, with any error
            return False
        if compare(torch_runner(job.graph)(images), logits).relative > tolerance:
            return False
    return True


def _check_sizes(job: Job, runners: Mapping[str, Runner]) -> None:
    """Raise if a file is wrong at other sizes; the float32 files stand for those converted from them."""
    for name, run in runners.items():
        if TARGETS[name].precision == "float32" and not takes_other_sizes(job, run):
            raise ExportRefusedError(
                f"{TARGETS[name].file} is wrong for images of other sizes than {job.preprocessing.size} "
                "pixels: use --free-size false"
            )
