"""``covpool fit``: see :func:`covpool.evaluate.fit.fit_images`."""

# Annotations are not postponed: jsonargparse would import the modules under TYPE_CHECKING to evaluate them.
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covpool.evaluate.probe.options import FitOptions

EXAMPLE = "covpool fit birds --seeds 1"


@dataclass(frozen=True)
class Arguments:
    """Train a model on a folder of images, and compare it with average pooling.

    It checks the images, compares heads on a frozen pretrained backbone, and writes a bundle and a report.
    With --finetune it then trains the whole network. It always starts from pretrained weights; covpool train
    also trains from scratch. Rerun the command to resume after an interruption.

    Attributes:
        data: a folder of classes, with or without train, val and test; a CSV of path,label; CUB-200-2011,
            FGVC-Aircraft or Stanford Cars as published; Parquet files with image and label; or shards.
        out: folder of the results; runs/ and the name of the data if not given.
    """

    data: str
    out: Path | None = None


OPTIONS = (FitOptions,)


@dataclass(frozen=True)
class Result:
    """The folder, and the contents of ``results.json``."""

    folder: str
    record: dict[str, Any]


def run(arguments: Arguments, options: FitOptions) -> Result:
    """Fit."""
    from covpool.evaluate.fit import fit_images
    from covpool.terminal import NamedProgress

    data = Path(os.path.abspath(arguments.data))  # not resolved: a link keeps its own name
    out = arguments.out or Path("runs") / ((data.stem if data.is_file() else data.name) or "fit")
    with NamedProgress() as progress:
        made = fit_images(arguments.data, options, out=out, log=progress.log, progress=progress)
    return Result(str(made.folder), made.record)


def text(result: Result) -> str:
    """Return a table, the paths, and the commands to type next."""
    from covpool.evaluate.fit import commands, table_cells
    from covpool.terminal import aligned

    record, folder = result.record, Path(result.folder)
    tuned = ", fine-tuned" if record["finetuned"] and record["finetuned"]["is_best"] else ""
    where = record["split"] if record["split"] == "cross-validation" else f"{record['split']} images"
    lines = [aligned(table_cells(record)), ""]
    lines.append(f"best: {record['best']}{tuned}, top-1 {record['top1']:.1%} ({where})")
    lines += [f"model: {folder / 'bundle'}", f"report: {folder / 'report.html'}", "", "next:"]
    for purpose, command in commands(record["arguments"]["data"], folder, record):
        lines += [f"  {command}", f"    {purpose}"]
    return "\n".join(lines)
