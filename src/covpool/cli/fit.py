"""``covpool fit``, ``update``, ``forget`` and ``merge``: see :mod:`covpool.closed_form`."""

# Annotations are not postponed: jsonargparse would import the modules under TYPE_CHECKING to evaluate them.
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covpool.arguments import Device
from covpool.cli.main import Command
from covpool.closed_form.options import FitOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from covpool.closed_form.kept import Changed


@dataclass(frozen=True)
class FitArguments:
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


@dataclass(frozen=True)
class FitResult:
    """The folder, and the contents of ``results.json``."""

    folder: str
    record: dict[str, Any]


def run_fit(arguments: FitArguments, options: FitOptions) -> FitResult:
    """Fit."""
    from covpool.closed_form.fitting import fit

    fitted = fit(arguments.data, arguments.out, options)
    return FitResult(str(fitted.folder), fitted.metrics)


def text_of_fit(result: FitResult) -> str:
    """Return a table, the paths, and the commands to type next."""
    from covpool.closed_form.report import LABELS, commands, table_cells
    from covpool.terminal import aligned

    record, folder = result.record, Path(result.folder)
    (seeds,) = (head["seeds"] for head in record["heads"] if head["head"] == record["best"])
    which = f", seed 0 of {seeds}" if seeds is not None and seeds > 1 else ""
    if record["finetuned"] and record["finetuned"]["is_best"]:
        which = ", fine-tuned"
    where = record["split"] if record["split"] == "cross-validation" else f"{record['split']} images"
    lines = [aligned(table_cells(record)), ""]
    lines.append(f"best: {record['best']}{which}, top-1 {record['top1']:.1%} ({where})")
    lines += [f"model: {folder / 'bundle'}", f"report: {folder / 'report.html'}"]
    if record["problems"]:
        problems = ", ".join(f"{count:,} {problem}" for problem, count in record["problems"].items())
        lines.append(f"problems: {problems}, in {folder / 'problems.csv'}")
    if record["doubtful_labels"] and (folder / LABELS).exists():
        count = f"{record['doubtful_labels']:,} of {record['images']['train']:,}"
        lines.append(f"labels to check: {count}, the most doubtful first, in {folder / LABELS}")
    lines += ["", "next:"]
    for purpose, command in commands(record["arguments"]["data"], folder, record):
        lines += [f"  {command}", f"    {purpose}"]
    return "\n".join(lines)


fit = Command(FitArguments, "covpool fit birds --keep-sums", run_fit, text_of_fit, OPTIONS=(FitOptions,))


@dataclass(frozen=True)
class UpdateArguments:
    """Add images, and classes, to a fitted model in seconds.

    The model becomes that of a fit to all images, with the PCA basis of the first fit. Images that it already
    contains are not counted again.

    Attributes:
        model: folder of covpool fit --keep-sums; its bundle and sums are replaced.
        data: images to add, as for covpool fit; if they have splits, those of train.
        workers: processes that read images.
        device: auto uses a GPU if there is one.
    """

    model: Path
    data: str
    workers: int = 2
    device: Device = "auto"


@dataclass(frozen=True)
class ForgetArguments:
    """Remove images from a fitted model, which becomes that of a fit without them.

    Images are recognized by their bytes, whatever their names.

    Attributes:
        model: folder of covpool fit --keep-sums; its bundle and sums are replaced.
        data: images to remove: a photograph, a folder, or a CSV with a column path.
        workers: processes that read images.
        device: auto uses a GPU if there is one.
    """

    model: Path
    data: str
    workers: int = 2
    device: Device = "auto"


@dataclass(frozen=True)
class MergeArguments:
    """Merge two fitted models into one of all their images, without the images.

    Both need the same backbone and PCA basis: run the second covpool fit with --basis FIRST.

    Attributes:
        first: folder of covpool fit --keep-sums.
        second: folder of another one.
        out: new folder of the merged model.
    """

    first: Path
    second: Path
    out: Path = Path("runs/merged")


def run_update(arguments: UpdateArguments) -> "Changed":
    """Update."""
    from covpool.closed_form.kept import update

    return _with_progress(update, arguments)


def run_forget(arguments: ForgetArguments) -> "Changed":
    """Forget."""
    from covpool.closed_form.kept import forget

    return _with_progress(forget, arguments)


def _with_progress(
    change: "Callable[..., Changed]", arguments: UpdateArguments | ForgetArguments | MergeArguments
) -> "Changed":
    from covpool.terminal import NamedProgress

    with NamedProgress() as progress:
        return change(**vars(arguments), progress=progress)


def run_merge(arguments: MergeArguments) -> "Changed":
    """Merge."""
    from covpool.closed_form.kept import merge

    return _with_progress(merge, arguments)


def text(result: "Changed") -> str:
    """Return what changed, and the accuracy on held-out images."""
    from covpool.terminal import counted, printable

    lines = [f"{counted(result.images, 'image')} of {counted(result.classes, 'class')}"]
    if result.held_out_before is not None:
        verb = "added" if result.new_images >= 0 else "removed"
        changes = [counted(abs(result.new_images), "image")]
        changes += [counted(abs(result.new_classes), "class")] if result.new_classes else []
        lines.append(f"{verb}: {', '.join(changes)}")
        if result.new_images < 0:
            lines.append("also removed: the report and other files that may show or name these images")
        else:
            lines.append("the report and the tables are still those of the fit")
    if result.known_images:
        lines.append(f"already counted: {counted(result.known_images, 'image')}")
    if result.unreadable:
        images = counted(len(result.unreadable), "image")
        lines.append(f"unreadable, not added: {images}, first {printable(result.unreadable[0])}")
    before = "" if result.held_out_before is None else f" (before: {result.held_out_before:.1%})"
    lines.append(f"top-1 on held-out training images: {result.held_out:.1%}{before}")
    lines.append(f"model: {result.folder / 'bundle'}")
    return "\n".join(lines)


update = Command(UpdateArguments, "covpool update runs/birds more_birds", run_update, text)
forget = Command(ForgetArguments, "covpool forget runs/birds photo.jpg", run_forget, text)
merge = Command(MergeArguments, "covpool merge runs/site1 runs/site2 --out runs/both", run_merge, text)
