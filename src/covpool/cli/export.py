"""``covpool export``: see :func:`covpool.export.export_model`."""

# Annotations are not postponed here: jsonargparse would import what is for type checkers to evaluate them.
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from covpool.data.layouts import Layout
from covpool.errors import UsageError

EXAMPLE = "covpool export runs/birds/bundle --data birds --out runs/birds/exported"


@dataclass(frozen=True)
class Arguments:
    """Export a bundle to ONNX and torch.export, and compare every file with it on your own images.

    Told are the largest difference of a logit, how often the first class is the same, sizes, and the time of
    a call beside torch's. Files that are too far from the bundle are not kept: the exit code is then 2.

    Attributes:
        bundle: of a trained network.
        out: a new folder, or that of an earlier export.
        data: images as for covpool train; those that the bundle's recipe names if not given.
        formats: ``onnx``, ``onnx-float16``, ``onnx-int8`` and ``torch``, by commas.
        preprocessing: ``inside``: the graph takes pixels and normalises them; ``beside``: it takes normalised
            images.
        free_size: leave the size of the images open, where the backbone is a convolution.
        split: to compare on; test where there is one, else val, else train, if not given.
        layout: of the data; ``auto`` finds it out.
        images: to compare on, at most.
        calibration: images of train that int8 is fitted to, at most.
        rounds: calls that are timed.
        compile: time torch.compile too.
        batch_size: images at a time in the comparison; a timed call has one.
        workers: processes that read images.
        force: keep files that are too far from the bundle.
    """

    bundle: Path
    out: Path | None = None
    data: str | None = None
    formats: str = "onnx,torch"
    preprocessing: Literal["inside", "beside"] = "inside"
    free_size: bool = True
    split: str | None = None
    layout: Layout = "auto"
    images: int = 1000
    calibration: int = 128
    rounds: int = 100
    compile: bool = False
    batch_size: int = 16
    workers: int = 0
    force: bool = False


@dataclass(frozen=True)
class Exported:
    """Where the files are, and how they compare."""

    folder: str
    results: dict[str, Any]


def run(arguments: Arguments) -> Exported:
    """Export, and compare."""
    from covpool.cli.parser import part_of
    from covpool.export import ExportOptions, export_model
    from covpool.progress import Progress

    if arguments.out is None:
        raise UsageError("where should the files go? give --out")
    options = part_of(arguments, ExportOptions)
    done = export_model(
        arguments.bundle,
        arguments.out,
        data=arguments.data,
        options=options,
        force=arguments.force,
        progress=Progress,
    )
    return Exported(str(done.folder), done.results)


def text(result: Exported) -> str:
    """A table, and where everything is."""
    from covpool.export.export_results import results_table

    return f"{results_table(result.results)}\n\nfiles and results: {result.folder}"
