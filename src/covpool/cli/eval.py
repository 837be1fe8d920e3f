"""``covpool eval``: see :func:`covpool.evaluate.accuracy.evaluate`."""

# Annotations are not postponed here: jsonargparse would import what is for type checkers to evaluate them.
from dataclasses import asdict, dataclass
from typing import Any, Literal

from covpool.data.layouts import Layout

EXAMPLE = "covpool eval runs/birds/bundle birds --out runs/birds/evaluation"


@dataclass(frozen=True)
class Arguments:
    """Try a bundle on images: how often it is right, for which classes, and whether it knows it.

    Metrics come with 95 % intervals of a bootstrap over images. The folder gets results.json, tables of all
    predictions and of the classes, and figures. Under torchrun the images are divided among the processes.

    Attributes:
        bundle: a folder of covpool train or covpool convert.
        data: a folder of classes, with or without train, val and test; a CSV of path,label; CUB-200-2011,
            FGVC-Aircraft or Stanford Cars as their authors ship them; Parquet files of image and
            label; or shards.
        out: a new folder for the results, or that of an earlier evaluation.
        split: train, val or test, or several joined by a plus.
        layout: of the data; ``auto`` finds it out.
        views: ``flip`` averages the logits of an image and its mirror, ``ten-crop`` those of ten parts of it.
        batch_size: images at a time, in each process.
        workers: processes that read images, for each process.
        device: ``auto`` takes a GPU if there is one.
        precision: of autocast.
        seed: of the bootstrap.
    """

    bundle: str
    data: str
    out: str = "evaluation"
    split: str = "test"
    layout: Layout = "auto"
    views: Literal["one", "flip", "ten-crop"] = "one"
    batch_size: int = 64
    workers: int = 2
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    seed: int = 0


@dataclass(frozen=True)
class Evaluated:
    """Where the results are, and what they are."""

    folder: str
    results: dict[str, Any]


def run(arguments: Arguments) -> Evaluated:
    """Evaluate, and write the folder."""
    from covpool.evaluate.accuracy import evaluate
    from covpool.progress import Progress

    with Progress("images") as progress:
        done = evaluate(**asdict(arguments), progress=progress)
    return Evaluated(str(done.folder), done.results)


def text(result: Evaluated) -> str:
    """A table, and where the rest is."""
    from covpool.evaluate.accuracy import results_table
    from covpool.evaluate.results import closing_lines

    return f"{results_table(result.results)}\n\n{closing_lines(result.folder, result.results)}"
