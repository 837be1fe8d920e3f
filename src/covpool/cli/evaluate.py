"""``covpool eval`` and ``covpool retrieve``: see :mod:`covpool.evaluate`."""

# Annotations are not postponed: jsonargparse would import the modules under TYPE_CHECKING to evaluate them.
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from covpool.arguments import Device
from covpool.cli.main import Command
from covpool.data import Layout
from covpool.errors import UsageError

if TYPE_CHECKING:
    from covpool.evaluate.neighbors import Neighbors


@dataclass(frozen=True)
class EvalArguments:
    """Measure the accuracy and the calibration of a bundle, over all images and per class.

    Metrics have 95 % intervals from a bootstrap over images. The folder gets results.json, tables of all
    predictions and of the classes, and figures. Under torchrun the processes share the images.

    Attributes:
        bundle: folder of a model, as bundle of covpool fit and train, or hf-hub:user/name.
        data: a folder of classes, with or without train, val and test; a CSV of path,label; CUB-200-2011,
            FGVC-Aircraft or Stanford Cars as published; or shards.
        out: folder for the results, new or from an earlier evaluation.
        split: train, val or test, or several joined by a plus; test, or else val, or else all images if not
            given.
        views: ``flip`` averages the logits of an image and its horizontal flip, ``ten-crop`` those of ten
            crops.
        seed: random seed of the bootstrap.
    """

    bundle: str
    data: str
    out: str = "runs/evaluation"
    split: str | None = None
    views: Literal["one", "flip", "ten-crop"] = "one"
    seed: int = 0


@dataclass(frozen=True)
class RetrieveArguments:
    """Search for images of the same class by a bundle's embeddings: recall at k, mAP, and mAP at R.

    The embedding is the vector that the classifier receives; images are compared by cosine similarity. Their
    classes may differ from the bundle's. The folder gets results.json, a table of the queries, and a figure
    with examples. Under torchrun the processes share the images.

    Attributes:
        bundle: folder of a model, as bundle of covpool fit and train, or hf-hub:user/name.
        data: a folder of classes, with or without train, val and test; a CSV of path,label; CUB-200-2011,
            FGVC-Aircraft or Stanford Cars as published; or shards.
        out: folder for the results, new or from an earlier search.
        split: split of the queries: train, val or test, or several joined by a plus; test, or else val, or
            else all images if not given.
        gallery: split that is searched, or several joined by a plus; that of the queries if not given. A
            query of a split never finds itself. Or a folder of covpool embed: then data is a photograph, or a
            folder of up to 24, to search for.
        images: folder of the images in a gallery of covpool embed, to draw the neighbors.
        at: values of k for recall at k.
        engine: ``faiss`` (pip install 'covpool[faiss]') is exact too, but does not report mAP: it ranks no
            more images than recall and mAP at R need.
    """

    bundle: str
    data: str
    out: str = "runs/retrieval"
    split: str | None = None
    gallery: str | None = None
    images: str | None = None
    at: tuple[int, ...] = (1, 2, 4, 8)
    engine: Literal["exact", "faiss"] = "exact"


@dataclass(frozen=True)
class Reading:
    """How images are read and go through the network.

    Attributes:
        layout: layout of the data; ``auto`` detects it.
        batch_size: images per batch, in each process.
        workers: processes that read images, for each process.
        device: ``auto`` uses a GPU if there is one.
        precision: autocast precision.
    """

    layout: Layout = "auto"
    batch_size: int = 64
    workers: int = 2
    device: Device = "auto"
    precision: Literal["float32", "bfloat16", "float16"] = "float32"


@dataclass(frozen=True)
class Measured:
    """The folder of the results, and the results."""

    folder: str
    results: dict[str, Any]


def run_eval(arguments: EvalArguments, reading: Reading) -> Measured:
    """Evaluate, and write the folder."""
    from covpool.evaluate.accuracy import measure_accuracy
    from covpool.terminal import Progress

    with Progress("images") as progress:
        done = measure_accuracy(**asdict(arguments), **asdict(reading), progress=progress)
    return Measured(str(done.folder), done.results)


def text_of_eval(result: Measured) -> str:
    """Return a table, and the paths of the files."""
    from covpool.evaluate.accuracy import results_table
    from covpool.evaluate.results import closing_lines

    return f"{results_table(result.results)}\n\n{closing_lines(result.folder, result.results)}"


def run_retrieve(arguments: RetrieveArguments, reading: Reading) -> "Measured | Neighbors":
    """Search, and write the folder."""
    from covpool.data.listing import is_image
    from covpool.evaluate.neighbors import find_neighbors, is_gallery

    bundle, gallery = arguments.bundle, arguments.gallery
    if gallery is not None and not is_gallery(gallery) and is_image(arguments.data):
        raise UsageError(f"--gallery {gallery} is not a folder of covpool embed")
    if gallery is not None and is_gallery(gallery):
        return find_neighbors(
            bundle,
            arguments.data,
            gallery,
            arguments.out,
            most=max(arguments.at),
            images=arguments.images,
            device=reading.device,
        )
    from covpool.evaluate.retrieval import retrieve
    from covpool.terminal import Progress

    with Progress("images") as progress:
        given = {name: value for name, value in asdict(arguments).items() if name != "images"}
        done = retrieve(**given, **asdict(reading), progress=progress)
    return Measured(str(done.folder), done.results)


def text_of_retrieve(result: "Measured | Neighbors") -> str:
    """Return a table, and the paths of the files."""
    if not isinstance(result, Measured):
        lines = []
        for name, nearest in result.neighbors.items():
            lines += [f"{name}:", *(f"  {neighbor.similarity:.3f}  {neighbor.id}" for neighbor in nearest)]
        return "\n".join([*lines, f"picture: {result.folder / 'neighbors.png'}"])
    from covpool.evaluate.results import closing_lines
    from covpool.evaluate.retrieval import results_table

    return f"{results_table(result.results)}\n\n{closing_lines(result.folder, result.results)}"


eval = Command(
    EvalArguments,
    "covpool eval runs/birds/bundle birds --out runs/birds/evaluation",
    run_eval,
    text_of_eval,
    OPTIONS=(Reading,),
)
retrieve = Command(
    RetrieveArguments,
    "covpool retrieve runs/birds/bundle birds --out runs/birds/retrieval",
    run_retrieve,
    text_of_retrieve,
    OPTIONS=(Reading,),
)
