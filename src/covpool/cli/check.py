"""``covpool check``: see :func:`covpool.data.check.check`."""

# Annotations are not postponed here: jsonargparse would import what is for type checkers to evaluate them.
from dataclasses import asdict, dataclass
from pathlib import Path

from covpool.data.layouts import Layout
from covpool.errors import UsageError

REPORT = "problems.csv"
EXAMPLE = "covpool check birds"


@dataclass(frozen=True)
class Arguments:
    """Look at every image before anything is trained on them, and write a CSV of what is wrong.

    Found are images that are unreadable, truncated, too large, black, missing or named as another format;
    equal images, in a split, under two labels or in train and test; and classes without images. Files are
    only read. The exit code is 0 if nothing was found and 1 if something was.

    Attributes:
        data: a folder of classes, with or without train, val and test; a CSV of path,label; CUB-200-2011,
            FGVC-Aircraft or Stanford Cars as their authors ship them; Parquet files of image and
            label; or shards.
        out: the CSV, ``problems.csv`` in the current folder if not given.
        layout: of the data; ``auto`` finds it out.
        workers: threads that read images; as many as there are cores if not given.
    """

    data: str
    out: Path | None = None
    layout: Layout = "auto"
    workers: int | None = None


@dataclass(frozen=True)
class Checked:
    """What was looked at, how many problems of each kind there are, and where they are listed."""

    data: str
    layout: str
    images: dict[str, int]
    classes: int
    problems: dict[str, int]
    output: str


def run(arguments: Arguments) -> Checked:
    """Look, and write the CSV."""
    from covpool.data.check import check, check_output, write_report
    from covpool.progress import Progress

    output = arguments.out or _default_output(arguments.data)
    check_output(output)  # now, not after hours of reading
    with Progress("images") as progress:
        report = check(arguments.data, arguments.layout, workers=arguments.workers, progress=progress)
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
    """A table."""
    from covpool.data.check import report_text

    return report_text(**asdict(result))


def exit_code(result: Checked) -> int:
    """0 if nothing was found, 1 if something was."""
    return int(bool(result.problems))


def _default_output(data: str) -> Path:
    from covpool.durable import is_inside

    if is_inside(REPORT, data):
        raise UsageError(f"{REPORT} would go into the data itself: give --out")
    return Path(REPORT)
