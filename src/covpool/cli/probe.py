"""``covpool probe``: see :func:`covpool.evaluate.probe.probe`."""

# Annotations are not postponed: jsonargparse would import the modules under TYPE_CHECKING to evaluate them.
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covpool.data.layouts import Layout
from covpool.evaluate.probe.options import ProbeOptions

EXAMPLE = "covpool probe birds --model lcnet_050 --weights lcnet_050.pth --seeds 1"


@dataclass(frozen=True)
class Arguments:
    """Train heads on a frozen backbone, in minutes, and save the best as a bundle.

    The backbone processes every image and its horizontal flip once. Its features are cached on disk for other
    heads, seeds and settings. Rerun the command to resume after an interruption.

    Attributes:
        data: images with train, and test or val: a folder of classes, a CSV, a benchmark, or shards.
        out: folder of the results.
        cache: folder of the features.
        max_cache: largest size of the features, in gigabytes.
        layout: layout of the data; ``auto`` detects it.
    """

    data: str
    out: Path = Path("runs/probe")
    cache: Path = Path("runs/features")
    max_cache: float = 20.0
    layout: Layout = "auto"


OPTIONS = (ProbeOptions,)
# Fields of ProbeOptions that are for Python only.
SKIP = ("label_smoothing", "extract_batch")


@dataclass(frozen=True)
class Result:
    """The folder, the best head, and the contents of ``results.json``."""

    folder: str
    best: str | None
    record: dict[str, Any]


def run(arguments: Arguments, options: ProbeOptions) -> Result:
    """Train the heads."""
    from covpool.evaluate.probe import probe
    from covpool.terminal import NamedProgress

    with NamedProgress() as progress:
        made = probe(options=options, **vars(arguments), log=progress.log, progress=progress)
    return Result(str(made.folder), made.record["best"], made.record)


def text(result: Result) -> str:
    """Return a table, and the path of the best head."""
    from covpool.evaluate.probe.record import table_cells
    from covpool.terminal import aligned

    best = f"best head: {result.best}, in {result.folder}/bundle" if result.best else ""
    left_out = {split: count for split, count in result.record["images_left_out"].items() if count}
    bad = ", ".join(f"{count:,} of {split}" for split, count in left_out.items())
    unreadable = f"unreadable images: {bad}, left out; 'covpool check' lists them" if bad else ""
    where = "\n".join(filter(None, [unreadable, best, f"results: {result.folder}/results.json"]))
    return f"{aligned(table_cells(result.record))}\n\n{where}"
