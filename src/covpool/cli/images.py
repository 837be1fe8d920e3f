"""``covpool check`` and ``shard``: see :mod:`covpool.data.check` and :mod:`covpool.data.shards.write`."""

# Annotations are not postponed: jsonargparse would import the modules under TYPE_CHECKING to evaluate them.
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from covpool.cli.main import Command
from covpool.data import Layout
from covpool.errors import UsageError
from covpool.storage.files import MAX_TEXT_BYTES, read_file

if TYPE_CHECKING:
    from covpool.data.image_set import ImageSet
    from covpool.data.shards.index import ShardIndex
    from covpool.data.sources import Split


REPORT = "runs/problems.csv"


@dataclass(frozen=True)
class CheckArguments:
    """Check every image before training, and write a CSV of the problems.

    It finds images that are unreadable, truncated, too large, black, missing or named as another format;
    duplicates within a split, under two labels, or in train and test; and classes without images. It only
    reads the images. The exit code is 0 if there are no problems, else 1.

    Attributes:
        data: a folder of classes, with or without train, val and test; a CSV of path,label; CUB-200-2011,
            FGVC-Aircraft or Stanford Cars as published; Parquet files with image and label; or shards.
        out: CSV file of the problems; ``runs/problems.csv`` if not given.
        layout: layout of the data; ``auto`` detects it.
        workers: threads that read images; one per core if not given.
    """

    data: str
    out: Path | None = None
    layout: Layout = "auto"
    workers: int | None = None


@dataclass(frozen=True)
class Checked:
    """The data, the number of problems and of ignored files of each kind, and the file of the problems."""

    data: str
    layout: str
    images: dict[str, int]
    classes: int
    problems: dict[str, int]
    ignored: dict[str, int]
    output: str


def run_check(arguments: CheckArguments) -> Checked:
    """Check, and write the CSV."""
    from covpool.data.check import check, check_output, write_report
    from covpool.terminal import Progress

    output = arguments.out or _default_output(arguments.data)
    if output.parent.exists() or arguments.out is not None:
        check_output(output)  # before hours of reading
    with Progress("images") as progress:
        report = check(arguments.data, arguments.layout, workers=arguments.workers, progress=progress)
    if arguments.out is None:
        output.parent.mkdir(exist_ok=True)
    write_report(report.problems, output)
    return Checked(
        data=arguments.data,
        layout=report.layout,
        images={split: count for split, count in report.images.items()},
        classes=report.classes,
        problems=report.counts,
        ignored=dict(report.ignored),
        output=str(output),
    )


def text_of_check(result: Checked) -> str:
    """Return a table."""
    from covpool.data.check import report_text

    return report_text(**asdict(result))


def exit_code_of_check(result: Checked) -> int:
    """Return 0 if there are no problems, else 1."""
    return int(bool(result.problems))


def _default_output(data: str) -> Path:
    from covpool.storage.folders import is_inside

    if is_inside(REPORT, data):
        raise UsageError(f"{REPORT} would be inside the data: pass --out")
    return Path(REPORT)


check = Command(CheckArguments, "covpool check birds", run_check, text_of_check, exit_code=exit_code_of_check)


@dataclass(frozen=True)
class ShardArguments:
    """Write images into WebDataset tar shards, in random order, with an index of the image positions.

    It copies the image files unchanged. Each of train, val and test gets a folder of its name. With --index
    it writes only the index of existing tars: .png, .jpg and so on, each with a .cls.

    Attributes:
        data: a folder of classes, with or without train, val and test; a CSV of path,label; CUB-200-2011,
            FGVC-Aircraft or Stanford Cars as published; or, with ``--index``, a folder of tars.
        out: new folder for the shards; the name of the data and ``-shards`` if not given.
        index: write the index of existing tars.
        classes: text file with a class name on each line, in the order of the labels, for ``--index``; the
            names in the tars if not given, or the labels.
        layout: layout of the data; ``auto`` detects it.
        megabytes: size of a shard, in MB.
        seed: random seed of the order and of the validation split.
        val_fraction: share of the training images that becomes val where there is none, by class; shards
            cannot be divided later. 0 for none.
    """

    data: str
    out: str | None = None
    index: bool = False
    classes: Path | None = None
    layout: Layout = "auto"
    megabytes: int = 256
    seed: int = 0
    val_fraction: float = 0.0


@dataclass(frozen=True)
class Folder:
    """The contents of a folder of shards."""

    folder: str
    images: int
    classes: int
    shards: int
    bytes: int


@dataclass(frozen=True)
class Sharded:
    """The folders, and the number of samples left out because they have no image or no label."""

    folders: tuple[Folder, ...]
    left_out: int


def run_shard(arguments: ShardArguments) -> Sharded:
    """Write the shards, or the index of existing ones."""
    _check(arguments)
    return _index(arguments) if arguments.index else _write(arguments)


def text_of_shard(result: Sharded) -> str:
    """Return a line for each folder."""
    from covpool.terminal import counted

    lines = [
        f"{folder.folder}: {counted(folder.images, 'image')} of {counted(folder.classes, 'class')} in "
        f"{counted(folder.shards, 'shard')}, {folder.bytes / 1e6:,.1f} MB"
        for folder in result.folders
    ]
    if result.left_out:
        samples = counted(result.left_out, "sample")
        lines.append(f"left out: {samples} without an image, or without a label in .cls")
    return "\n".join(lines)


def _check(arguments: ShardArguments) -> None:
    """Raise if options contradict each other."""
    if arguments.index and arguments.out is not None:
        raise UsageError("--index writes next to the tars: remove --out")
    if not arguments.index and arguments.classes is not None:
        raise UsageError("--classes is only for --index: class names come from the images")
    if arguments.megabytes < 1:
        raise UsageError(f"--megabytes must be at least 1; got {arguments.megabytes}")
    if not 0 <= arguments.val_fraction < 1:
        raise UsageError(f"--val-fraction must be from 0 to below 1; got {arguments.val_fraction}")
    if arguments.index and arguments.val_fraction:
        raise UsageError("--val-fraction is not for --index: existing tars are not divided")
    for place in (arguments.data if arguments.index else "", arguments.out or ""):
        if "://" in place:
            raise UsageError(
                f"{place} is not a local folder: use one, and copy it to object storage afterwards"
            )


def _write(arguments: ShardArguments) -> Sharded:
    from covpool.data.shards.write import write_shards
    from covpool.data.sources import open_splits
    from covpool.storage.folders import check_new, new_folder, resolved
    from covpool.terminal import Progress

    output = Path(arguments.out or f"{Path(arguments.data).resolve().name}-shards")
    check_new(output)  # before hours of writing
    sets = _with_val(open_splits(arguments.data, arguments.layout), arguments)
    indexes = {}
    # All splits appear at once, so that an interrupted run leaves no incomplete data set.
    with new_folder(resolved(output)) as saving:
        for split, images in sets.items():
            with Progress(f"images of {split}") as progress:
                indexes[split] = write_shards(
                    images,
                    saving / split,
                    shard_bytes=arguments.megabytes * 10**6,
                    seed=arguments.seed,
                    progress=progress,
                )
    return Sharded(tuple(_folder(output / split, index) for split, index in indexes.items()), left_out=0)


def _with_val(sets: "Mapping[Split, ImageSet]", arguments: ShardArguments) -> "Mapping[Split, ImageSet]":
    """Split val off train, if there is none and ``--val-fraction`` is given."""
    from covpool.training.splits import split_off

    if not arguments.val_fraction or "val" in sets:
        return sets
    if "train" not in sets:
        raise UsageError(
            f"{arguments.data} has no training images to take val from: it has only {', '.join(sets)}"
        )
    train, val = split_off(sets["train"], arguments.val_fraction, arguments.seed)
    return {**sets, "train": train, "val": val}


def _index(arguments: ShardArguments) -> Sharded:
    from covpool.data.shards.write import index_shards, tar_folders
    from covpool.terminal import Progress

    names = None if arguments.classes is None else class_names(arguments.classes)
    folders = tar_folders(Path(arguments.data))
    with Progress("tars") as progress:
        indexes, left_out = index_shards(folders, names, progress)
    described = tuple(_folder(folder, index) for folder, index in zip(folders, indexes, strict=True))
    return Sharded(described, left_out)


def class_names(file: Path) -> list[str]:
    """Read a text file with the name of a class on each line."""
    try:
        names = (
            read_file(file, MAX_TEXT_BYTES).decode("utf-8-sig").rstrip().splitlines()
        )  # Windows editors write a byte order mark
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if not names:
        raise UsageError(f"{file} is empty: write one class name per line")
    if "" in names:
        raise UsageError(f"{file}: line {names.index('') + 1} is empty: write one class name per line")
    name, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise UsageError(f"{file} has {name!r} more than once: class names must be unique")
    return names


def _folder(folder: Path, index: "ShardIndex") -> Folder:
    return Folder(
        folder=str(folder),
        images=sum(index.counts),
        classes=len(index.classes),
        shards=len(index.shards),
        bytes=sum(shard.bytes for shard in index.shards),
    )


shard = Command(ShardArguments, "covpool shard birds --out birds-shards", run_shard, text_of_shard)
