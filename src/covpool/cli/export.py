"""``covpool export``: see :func:`covpool.export.export_model`."""

# Annotations are not postponed: jsonargparse would import the modules under TYPE_CHECKING to evaluate them.
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covpool.cli.main import Command
from covpool.export import ExportOptions

EXAMPLE = "covpool export runs/birds/bundle birds --out runs/birds/exported"


@dataclass(frozen=True)
class Arguments:
    """Export a bundle to ONNX and torch.export, and compare every file with the bundle on your own images.

    It prints the largest difference of a logit, the share of equal top-1 predictions, sizes, and the latency
    relative to torch. If a file differs too much from the bundle, none is written, and the exit code is 2.

    Attributes:
        bundle: folder of a model, as bundle of covpool fit and train, or hf-hub:user/name.
        data: images to compare on, as for covpool train.
        out: folder for the files, new or from an earlier export.
        force: keep files that differ too much from the bundle.
    """

    bundle: str
    data: str
    out: Path = Path("runs/export")
    force: bool = False


@dataclass(frozen=True)
class Exported:
    """The folder of the files, and the comparison."""

    folder: str
    results: dict[str, Any]


def run(arguments: Arguments, options: ExportOptions) -> Exported:
    """Export, and compare."""
    from covpool.export import export_model
    from covpool.terminal import Progress

    done = export_model(
        arguments.bundle,
        arguments.data,
        arguments.out,
        options=options,
        force=arguments.force,
        progress=Progress,
    )
    return Exported(str(done.folder), done.results)


def text(result: Exported) -> str:
    """Return a table, and the path of the folder."""
    from covpool.export.export_results import results_table

    return f"{results_table(result.results)}\n\nfiles and results: {result.folder}"


export = Command(Arguments, EXAMPLE, run, text, OPTIONS=(ExportOptions,))
