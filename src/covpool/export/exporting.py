"""Export a bundle, compare the exported files with the model, and write a report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from onnx import ModelProto

from covpool.durable import replace_folder, write_file
from covpool.errors import ExportRefusedError, UsageError
from covpool.export.formats import onnx_runner, to_onnx, torch_file_runner, write_onnx, write_torch
from covpool.export.graph import (
    Array,
    ExportGraph,
    Runner,
    Traced,
    example,
    may_have_free_size,
    torch_runner,
    trace,
)
from covpool.export.options import CPU, FORMATS, ExportOptions, Job, Progress, graph_input, open_job
from covpool.export.parity import TOLERANCES, Latency, Parity, compare, measure_latency, objection
from covpool.export.results import (
    METADATA,
    Results,
    as_strings,
    describe,
    export_results,
    prepare_export,
    write_export_results,
)
from covpool.export.smaller import to_half, to_int8
from covpool.inference.forward import Forward

# Heights and widths that a graph of free size is tried on, over its own: a little larger, larger and not
# square, smaller.
OTHER = ((1.2, 1.2), (2.3, 1.5), (0.6, 0.8))


def trace_model(job: Job, graph: ExportGraph) -> Traced:
    """The graph, of free size where the backbone permits it, which is tried and not believed."""
    size = job.preprocessing.size
    traced = trace(graph, size, free_size=job.options.free_size and may_have_free_size(job.model))
    if traced.has_free_size and not takes_other_sizes(job, graph, torch_runner(traced.program.module())):
        traced = trace(graph, size, free_size=False)
    return traced


def write_files(
    job: Job, traced: Traced, folder: Path, metadata: Mapping[str, str], progress: Progress
) -> None:
    """All files that are wanted."""
    wanted = job.options.formats
    written = to_onnx(traced) if any(name.startswith("onnx") for name in wanted) else None
    for name in wanted:
        path, precision = folder / FORMATS[name].file, FORMATS[name].precision
        told = {**metadata, "precision": f'"{precision}"'}
        if written is None or name == "torch":
            write_torch(traced, path, told)
        else:
            write_onnx(_converted(job, written, precision, progress), path, told)


def file_runners(job: Job, folder: Path) -> dict[str, Runner]:
    """What runs each file, by format."""
    return {
        name: (torch_file_runner if name == "torch" else onnx_runner)(folder / FORMATS[name].file)
        for name in job.options.formats
    }


def takes_other_sizes(job: Job, graph: ExportGraph, run: Runner) -> bool:
    """Whether images of other sizes give what they give in the model."""
    tolerance = TOLERANCES["float32"].relative
    assert tolerance is not None
    size = job.preprocessing.size
    for height, width in OTHER:
        images = example(graph, 1, round(height * size), round(width * size)).numpy()
        try:
            found = run(images)
        except Exception:  # of whatever layer does not take the size
            return False
        if compare(torch_runner(graph)(images), found).relative > tolerance:
            return False
    return True


def _converted(job: Job, model: ModelProto, precision: str, progress: Progress) -> ModelProto:
    if precision == "float16":
        return to_half(model)
    if precision == "int8":
        assert job.calibration is not None
        pixels = job.source.pixels(job.calibration, job.preprocessing, progress)
        takes_pixels = job.options.takes_pixels
        return to_int8(
            model, [graph_input(batch, job.preprocessing, takes_pixels=takes_pixels) for batch in pixels]
        )
    return model


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
    own, one = Forward(job.model, device=CPU, preprocessing=job.preprocessing), None
    for pixels in job.source.pixels(job.images, job.preprocessing, progress):
        reference.append(own(pixels)["logits"][0].numpy())
        images = graph_input(pixels, job.preprocessing, takes_pixels=job.options.takes_pixels)
        one = images[:1] if one is None else one
        for name, run in runners.items():
            found[name].append(run(images))
    if one is None:
        raise UsageError(f"no image of {job.split} could be read: 'covpool check' tells why")
    logits = np.concatenate(reference)
    if not np.isfinite(logits).all():
        raise UsageError("the bundle's own logits are not finite on these images: train it anew")
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
