"""``covpool retrieve``: see :func:`covpool.evaluate.retrieval.retrieve`."""

# Annotations are not postponed here: jsonargparse would import what is for type checkers to evaluate them.
from dataclasses import asdict, dataclass
from typing import Any, Literal

from covpool.data.layouts import Layout

EXAMPLE = "covpool retrieve runs/birds/bundle birds --out runs/birds/retrieval"


@dataclass(frozen=True)
class Arguments:
    """Search for images of the same class by a bundle's vectors: recall at k, mAP, and mAP at R.

    The vector of an image is what the bundle's classifier would receive; images are compared by cosine
    similarity. They need not be of classes that the bundle knows. The folder gets results.json, a table of
    the queries, and a picture of some with what was found. Under torchrun the images are divided among the
    processes.

    Attributes:
        bundle: a folder of covpool train or covpool convert.
        data: a folder of classes, with or without train, val and test; a CSV of path,label; CUB-200-2011,
            FGVC-Aircraft or Stanford Cars as their authors ship them; Parquet files of image and
            label; or shards.
        out: a new folder for the results, or that of an earlier search.
        split: of the queries: train, val or test, or several joined by a plus.
        gallery: the split that is searched, or several joined by a plus; if not given that of the queries.
            Where the queries are in it, each looks for the others.
        layout: of the data; ``auto`` finds it out.
        at: the ks of recall at k.
        engine: ``faiss`` (pip install 'covpool[faiss]') is exact too, but ranks no more images than recall
            and mAP at R need: there is no mAP.
        batch_size: images at a time, in each process.
        workers: processes that read images, for each process.
        device: ``auto`` takes a GPU if there is one.
        precision: of autocast.
    """

    bundle: str
    data: str
    out: str = "retrieval"
    split: str = "test"
    gallery: str | None = None
    layout: Layout = "auto"
    at: tuple[int, ...] = (1, 2, 4, 8)
    engine: Literal["exact", "faiss"] = "exact"
    batch_size: int = 64
    workers: int = 2
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["float32", "bfloat16", "float16"] = "float32"


@dataclass(frozen=True)
class Retrieved:
    """Where the results are, and what they are."""

    folder: str
    results: dict[str, Any]


def run(arguments: Arguments) -> Retrieved:
    """Search, and write the folder."""
    from covpool.evaluate.retrieval import retrieve
    from covpool.progress import Progress

    with Progress("images") as progress:
        done = retrieve(**asdict(arguments), progress=progress)
    return Retrieved(str(done.folder), done.results)


def text(result: Retrieved) -> str:
    """A table, and where the rest is."""
    from covpool.evaluate.results import closing_lines
    from covpool.evaluate.retrieval import results_table

    return f"{results_table(result.results)}\n\n{closing_lines(result.folder, result.results)}"
