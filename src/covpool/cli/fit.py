"""``covpool fit``: see :func:`covpool.closed_form.fitting.fit`."""

# Annotations are not postponed: jsonargparse would import the modules under TYPE_CHECKING to evaluate them.
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covpool.closed_form.options import FitOptions

EXAMPLE = "covpool fit birds --keep-sums"


@dataclass(frozen=True)
class Arguments:
    """Fit a model to a folder of images, and compare covariance pooling with average pooling.

    It runs a frozen pretrained backbone once over the images, solves linear classifiers in closed form, and
    writes a bundle and a report. With --finetune it then trains the whole network. covpool train also trains
    from scratch. Rerun the command to resume after an interruption.

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
    from covpool.closed_form.fitting import fit
    from covpool.terminal import NamedProgress

    with NamedProgress() as progress:
        fitted = fit(arguments.data, arguments.out, options, log=progress.log, progress=progress)
    return Result(str(fitted.folder), fitted.metrics)


def text(result: Result) -> str:
    """Return a table, the paths, and the commands to type next."""
    from covpool.closed_form.fitting import commands, table_cells
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
