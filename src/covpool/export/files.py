"""The files of an export, from a graph that is traced once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from onnx import ModelProto

from covpool.export.graph import ExportGraph, Traced, example, may_have_free_size, trace
from covpool.export.half import to_half
from covpool.export.images import Progress, graph_input
from covpool.export.job import Job
from covpool.export.onnx_file import onnx_runner, to_onnx, write_onnx
from covpool.export.options import FORMATS
from covpool.export.parity import compare
from covpool.export.quantize import to_int8
from covpool.export.running import Runner, torch_runner
from covpool.export.torch_file import torch_file_runner, write_torch
from covpool.export.verdict import TOLERANCES

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
