"""From a bundle to files for other engines, compared with it on the user's own images."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from covpool.durable.replacing import replace_folder, write_file
from covpool.export.files import file_runners, takes_other_sizes, trace_model, write_files
from covpool.export.graph import ExportGraph
from covpool.export.images import Progress, graph_input, normalized
from covpool.export.job import Job, open_job
from covpool.export.latency import Latency, measure_latency
from covpool.export.metadata import FILE as METADATA
from covpool.export.metadata import as_strings, describe
from covpool.export.options import FORMATS, ExportOptions
from covpool.export.parity import Parity, compare
from covpool.export.results import Results, export_results, prepare_export, write_export_results
from covpool.export.running import Array, Runner, torch_runner
from covpool.export.verdict import ExportRefusedError, objection

EAGER, COMPILED = "torch eager", "torch.compile"

Progresses = Callable[[str], AbstractContextManager[Progress]]


@contextmanager
def silent(what: str) -> Iterator[Progress]:
    """No progress bar."""
    yield lambda done, total: None


@dataclass(frozen=True, eq=False)
class ExportReport:
    """What was exported, and how it compares.

    Attributes:
        folder: with the files, ``model.json`` on how to use them, and ``results.json``.
        results: as in that file.
        parity: of every file with torch, by format.
        latency: of every file and of torch, by format or name.
    """

    folder: Path
    results: Results
    parity: dict[str, Parity]
    latency: dict[str, Latency]


def export_model(
    bundle: str | Path,
    out: str | Path,
    *,
    data: str | Path | None = None,
    options: ExportOptions | None = None,
    force: bool = False,
    progress: Progresses = silent,
) -> ExportReport:
    """Export a bundle, and compare every file with the bundle on images.

    Where a file is too far from the bundle nothing is kept: ``out`` stays as it was.

    Args:
        bundle: of a trained network, with a classifier.
        out: a new folder, or that of an earlier export, which is replaced.
        data: images of the bundle's classes; those that its recipe names if not given.
        options: what to export, and how to compare.
        force: keep files that are too far from the bundle.
        progress: from what is counted to a context manager of something to call with done and total.

    Raises:
        ExportRefusedError: a file is too far from the bundle.
        ValueError: in a sentence, for what the caller can mend.
    """
    options, out = options or ExportOptions(), Path(out)
    prepare_export(out)
    job = open_job(bundle, data, options)
    graph = ExportGraph(job.model, job.preprocessing if options.takes_pixels else None)
    with progress("graphs traced") as bar:
        bar(0, 1)  # which may take a minute
        traced = trace_model(job, graph)
    described = describe(job.card, traced, takes_pixels=options.takes_pixels)
    with replace_folder(out) as folder:
        with progress("images to fit int8 to") as bar:
            write_files(job, traced, folder, as_strings(described), bar)
        write_file(folder / METADATA, (json.dumps(described, indent=2, ensure_ascii=False) + "\n").encode())
        runners = file_runners(job, folder)
        with progress("images") as bar:
            parity, one = _compared(job, runners, bar)
        objections = _objections(parity)
        if objections and not force:
            raise ExportRefusedError(f"{objections[0]}: nothing was written (--force true keeps it)")
        if traced.has_free_size and not force:
            _check_sizes(job, graph, runners)
        with progress("rounds") as bar:
            latency = measure_latency(
                {**runners, **_of_torch(graph, options)}, one, options.rounds, progress=bar
            )
        results = export_results(job, traced, folder, parity, latency, objections)
        write_export_results(folder, results)
    return ExportReport(out, results, parity, latency)


def _check_sizes(job: Job, graph: ExportGraph, runners: Mapping[str, Runner]) -> None:
    """Raise if a file takes other sizes by its word alone; the float32 ones, which the others come from."""
    for name, run in runners.items():
        file, precision = FORMATS[name]
        if precision == "float32" and not takes_other_sizes(job, graph, run):
            raise ExportRefusedError(
                f"{file} is wrong for images of another size than its own: give --free-size false"
            )


def _compared(job: Job, runners: Mapping[str, Runner], progress: Progress) -> tuple[dict[str, Parity], Array]:
    """Every file beside torch, on all images; and the first image, as the files take it."""
    reference: list[Array] = []
    found: dict[str, list[Array]] = {name: [] for name in runners}
    own, one = torch_runner(job.model), None
    for pixels in job.source.pixels(job.images, job.preprocessing, progress):
        reference.append(own(normalized(pixels, job.preprocessing).numpy()))
        images = graph_input(pixels, job.preprocessing, takes_pixels=job.options.takes_pixels)
        one = images[:1] if one is None else one
        for name, run in runners.items():
            found[name].append(run(images))
    if one is None:
        raise ValueError(f"no image of {job.split} could be read: 'covpool check' tells why")
    logits = np.concatenate(reference)
    if not np.isfinite(logits).all():
        raise ValueError("the bundle's own logits are not finite on these images: train it anew")
    return {name: compare(logits, np.concatenate(parts)) for name, parts in found.items()}, one


def _objections(parity: Mapping[str, Parity]) -> list[str]:
    judged = [objection(*FORMATS[name], found) for name, found in parity.items()]
    return [sentence for sentence in judged if sentence is not None]


def _of_torch(graph: ExportGraph, options: ExportOptions) -> dict[str, Runner]:
    """What the files are timed against."""
    runners = {EAGER: torch_runner(graph)}
    if options.compile:
        runners[COMPILED] = torch_runner(torch.compile(graph))
    return runners
