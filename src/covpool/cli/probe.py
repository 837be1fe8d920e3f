"""``covpool probe``: see :func:`covpool.evaluate.probe.probe`."""

# Annotations are not postponed here: jsonargparse would import what is for type checkers to evaluate them.
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from covpool.data.layouts import Layout

EXAMPLE = "covpool probe birds --model lcnet_050 --weights lcnet_050.pth --seeds 1"


@dataclass(frozen=True)
class Arguments:
    """Train heads on a frozen backbone, in minutes, and keep the best as a bundle.

    The backbone sees every image and its mirror once; its features are kept on disk, and other heads, seeds
    and settings find them there. Stopped, the same command goes on.

    Attributes:
        data: images with train, and test or val beside it: a folder of classes, a CSV, a benchmark, shards.
        model: a backbone of timm.
        heads: pooling methods, ``cls`` for the class token, either joined by ``+gap`` or ``+cls``; by commas.
        dim: channels after the learned reduction of second-order heads.
        pretrained: timm's weights of the backbone, downloaded.
        weights: the backbone's weights, of a file.
        key_map: how the file's names become timm's: ``order``, or prefixes and what takes their place, as
            JSON.
        image_size: the side of the images, the backbone's own if not given.
        preprocessing: what differs from the backbone's own, such as ``{"mean": [0.5, 0.5, 0.5]}``.
        seeds: of every head so many are trained.
        epochs: over the images and their mirrors.
        batch_size: of a step of a head.
        lr: the learning rate at its highest.
        weight_decay: of AdamW.
        drop_rate: dropout before the classifier.
        val_fraction: of the training images, set aside by each seed to choose the best head by, where there
            is no val; 0 to choose none.
        svm_seeds: linear SVMs too, on the vectors of so many seeds of every head.
        precision: in which the backbone runs.
        compile: the backbone by torch.compile.
        workers: processes that read images.
        out: the folder of results.
        cache: the folder of features.
        max_cache: gigabytes that the features may take.
        layout: of the data; ``auto`` finds it out.
        device: ``auto`` takes a GPU if there is one.
    """

    data: str
    model: str = "resnet50"
    heads: str = "gap,isqrt_cov,isqrt_cov+gap"
    dim: int = 128
    pretrained: bool = False
    weights: Path | None = None
    key_map: Literal["order"] | dict[str, str | None] | None = None
    image_size: int | None = None
    preprocessing: dict[str, Any] = field(default_factory=dict)
    seeds: int = 3
    epochs: int = 25
    batch_size: int = 64
    lr: float = 3e-3
    weight_decay: float = 0.05
    drop_rate: float = 0.5
    val_fraction: float = 0.2
    svm_seeds: int = 0
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    compile: bool = False
    workers: int = 2
    out: Path = Path("probe")
    cache: Path = Path("probe-cache")
    max_cache: float = 20.0
    layout: Layout = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"


# Those that are not of the heads and the backbone, but of where things are.
PLACES = ("data", "out", "cache", "max_cache", "layout")


@dataclass(frozen=True)
class Result:
    """The folder, the best head, and all of ``results.json``."""

    folder: str
    best: str | None
    record: dict[str, Any]


def run(arguments: Arguments) -> Result:
    """Train them."""
    from covpool.evaluate.probe import ProbeOptions, probe
    from covpool.progress import NamedProgress

    values = {name: value for name, value in vars(arguments).items() if name not in PLACES}
    options = ProbeOptions(
        **{
            **values,
            "heads": tuple(head.strip() for head in arguments.heads.split(",") if head.strip()),
            "weights": None if arguments.weights is None else str(arguments.weights),
        }
    )
    with NamedProgress() as progress:
        made = probe(
            arguments.data,
            options,
            out=arguments.out,
            cache=arguments.cache,
            max_cache=arguments.max_cache,
            layout=arguments.layout,
            tell=progress.tell,
            progress=progress,
        )
    return Result(str(made.folder), made.record["best"], made.record)


def text(result: Result) -> str:
    """A table, and where the best head is."""
    from covpool.evaluate.probe.record import table_cells
    from covpool.wording import aligned

    best = f"best where it was chosen: {result.best}, in {result.folder}/bundle" if result.best else ""
    left_out = {split: count for split, count in result.record["images_left_out"].items() if count}
    bad = ", ".join(f"{count:,} of {split}" for split, count in left_out.items())
    told = f"bad images: {bad}, left out; 'covpool check' lists them" if bad else ""
    where = "\n".join(filter(None, [told, best, f"results: {result.folder}/results.json"]))
    return f"{aligned(table_cells(result.record))}\n\n{where}"
