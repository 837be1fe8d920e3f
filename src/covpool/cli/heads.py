"""``covpool probe`` and ``svm``: see :mod:`covpool.evaluate.probe` and :mod:`covpool.evaluate.svm`."""

# Annotations are not postponed: jsonargparse would import the modules under TYPE_CHECKING to evaluate them.
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from covpool.arguments import Device
from covpool.cli.main import Command
from covpool.data import Layout
from covpool.evaluate.probe.options import ProbeOptions

if TYPE_CHECKING:
    from covpool.evaluate.svm import SVMReport


@dataclass(frozen=True)
class ProbeArguments:
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


@dataclass(frozen=True)
class ProbeResult:
    """The folder, the best head, and the contents of ``results.json``."""

    folder: str
    best: str | None
    record: dict[str, Any]


def run_probe(arguments: ProbeArguments, options: ProbeOptions) -> ProbeResult:
    """Train the heads."""
    from covpool.evaluate.probe import probe
    from covpool.terminal import NamedProgress

    with NamedProgress() as progress:
        probed = probe(options=options, **vars(arguments), log=progress.log, progress=progress)
    return ProbeResult(str(probed.folder), probed.record["best"], probed.record)


def text_of_probe(result: ProbeResult) -> str:
    """Return a table, and the path of the best head."""
    from covpool.evaluate.probe.record import chosen_on, table_cells
    from covpool.terminal import aligned

    column = f"{chosen_on(result.record['images'])}, flip"
    best = f"best head: {result.best}, by '{column}', in {result.folder}/bundle" if result.best else ""
    left_out = {split: count for split, count in result.record["images_left_out"].items() if count}
    bad = ", ".join(f"{count:,} of {split}" for split, count in left_out.items())
    unreadable = f"unreadable images: {bad}, left out; 'covpool check' lists them" if bad else ""
    where = "\n".join(filter(None, [unreadable, best, f"results: {result.folder}/results.json"]))
    return f"{aligned(table_cells(result.record))}\n\n{where}"


# label_smoothing and extract_batch are for Python only.
probe = Command(
    ProbeArguments,
    "covpool probe birds --model lcnet_050 --weights lcnet_050.pth --seeds 1",
    run_probe,
    text_of_probe,
    OPTIONS=(ProbeOptions,),
    SKIP=("label_smoothing", "extract_batch"),
)


@dataclass(frozen=True)
class SvmArguments:
    """Fit linear SVMs on a trained network's features: the fine-grained protocol.

    It trains one SVM per class on normalized features of the training images and their horizontal flips. The
    new bundle has the SVMs as its classifier. It reports top-1 accuracy of the bundle's own classifier and of
    the SVMs, with and without averaging over the flip.

    Attributes:
        bundle: folder of a model, as bundle of covpool fit and train, or hf-hub:user/name.
        data: images, as for covpool train.
        out: folder for the new bundle.
        split: training split: ``train``, or ``train+val``.
        layout: layout of the data; ``auto`` detects it.
        features: folder for the features, which another fit reuses; next to the new bundle if not given.
        c: regularization parameter C of the SVMs.
        calibrate: scale every class's scores so that the medians of its own and of other images are 1 and -1.
        max_memory: memory limit in GB; features are streamed from disk if LinearSVC would need more.
        batch_size: images per batch.
        workers: processes that load images.
        precision: precision of the network.
        device: ``auto`` uses a GPU if there is one.
    """

    bundle: str
    data: str
    out: Path = Path("runs/svm")
    split: str = "train"
    layout: Layout = "auto"
    features: Path | None = None
    c: float = 1.0
    calibrate: bool = False
    max_memory: float = 8.0
    batch_size: int = 32
    workers: int = 0
    precision: Literal["float32", "bfloat16"] = "float32"
    device: Device = "auto"


def run_svm(arguments: SvmArguments) -> "SVMReport":
    """Fit, save, and measure."""
    from covpool.evaluate.svm import Passing, fit_svm
    from covpool.terminal import Progress

    return fit_svm(
        arguments.bundle,
        arguments.data,
        arguments.out,
        split=arguments.split,
        layout=arguments.layout,
        features=arguments.features,
        c=arguments.c,
        calibrate=arguments.calibrate,
        max_memory=arguments.max_memory,
        passing=Passing(arguments.batch_size, arguments.workers, arguments.precision, arguments.device),
        log=Progress().line,
        progress=Progress,
    )


def text_of_svm(result: "SVMReport") -> str:
    """Return a small table, and the paths."""
    lines = []
    if (accuracy := result.accuracy) is not None:
        rows = (("own classifier", accuracy.own, accuracy.own_flip), ("SVM", accuracy.svm, accuracy.svm_flip))
        lines.append(f"{'top-1, %':<16}{'image':>8}{'image and flip':>18}")
        for name, plain, flipped in rows:
            if plain is not None and flipped is not None:
                lines.append(f"{name:<16}{100 * plain:>8.2f}{100 * flipped:>18.2f}")
        lines.append(f"on {accuracy.images:,} test images; {accuracy.left_out} unreadable\n")
    lines.append(
        f"{result.classes} SVMs on {result.samples:,} rows of {result.columns:,} values, "
        f"with {result.solver} in {result.seconds:.0f} s"
    )
    lines.append(f"saved in {result.bundle}; you can delete the cached features in {result.features}")
    return "\n".join(lines)


svm = Command(SvmArguments, "covpool svm runs/birds/bundle birds --out runs/birds/svm", run_svm, text_of_svm)
