"""``covpool check``: see :func:`covpool.data.check.check`."""

# Annotations are not postponed: jsonargparse would import the modules under TYPE_CHECKING to evaluate them.
from dataclasses import asdict, dataclass
from pathlib import Path

from covpool.data.layouts import Layout
from covpool.errors import UsageError

REPORT = "runs/problems.csv"
EXAMPLE = "covpool check birds"


@dataclass(frozen=True)
class Arguments:
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
    """The data, the number of problems of each kind, and the file that lists them."""

    data: str
    layout: str
    images: dict[str, int]
    classes: int
    problems: dict[str, int]
    output: str


def run(arguments: Arguments) -> Checked:
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
        output=str(output),
    )


def text(result: Checked) -> str:
    """Return a table."""
    from covpool.data.check import report_text

    return report_text(**asdict(result))


def exit_code(result: Checked) -> int:
    """Return 0 if there are no problems, else 1."""
    return int(bool(result.problems))


def _default_output(data: str) -> Path:
    from covpool.storage.folders import is_inside

    if is_inside(REPORT, data):
        raise UsageError(f"{REPORT} would be inside the data: pass --out")
    return Path(REPORT)
