"""Check a data set: unreadable images, duplicates, leaks, small classes."""

from __future__ import annotations

import errno
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from covpool.data.decode import BEGINNING, EXTENSIONS, NOT_READ, format_of
from covpool.data.image_set import ENCODING, ERRORS, ImageSet, class_counts
from covpool.data.listing import is_image, is_visible
from covpool.data.look import Collection, Problem, Progress
from covpool.data.sources import Split, layout_of, read_splits
from covpool.data.sources.folder import split_folders
from covpool.device import available_cores
from covpool.errors import UsageError
from covpool.storage.files import csv_text, open_regular, replace_file
from covpool.terminal import counted

NOT_IMAGES = ("a web page", "a Git LFS pointer", "PDF", "SVG")


def strays(root: Path, ignored: Counter[str]) -> Iterator[tuple[str, str, str]]:
    """Yield path, problem and detail of each image in a folder of classes that is not used.

    Args:
        root: the folder.
        ignored: receives the number of other files by extension.
    """
    splits = set(split_folders(root).values())
    tops = {"", *splits}
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(filter(is_visible, folders))
        inside = os.path.relpath(folder, root).replace(os.sep, "/").removeprefix(".")
        for name in sorted(filter(is_visible, files)):
            path = "/".join(filter(None, (inside, name)))
            if not is_image(name):
                pictures = list(_renamed(root, path))
                ignored[os.path.splitext(name)[1].lower() or name] += not pictures
                yield from pictures
            elif inside in tops:
                yield path, "no class", "it is not in the folder of a class"
            elif splits and inside.partition("/")[0] not in splits:
                yield path, "no class", f"it is not in {' or '.join(sorted(splits))}"


def _renamed(root: Path, path: str) -> Iterator[tuple[str, str, str]]:
    extension = os.path.splitext(path)[1].lower()
    if extension in NOT_READ:
        yield path, "not read", f"{extension} is not read: {NOT_READ[extension]}"
        return
    try:
        with open_regular(root / path) as file:
            image_format = format_of(file.read(BEGINNING))
    except OSError:
        return
    if image_format in EXTENSIONS:
        yield path, "not read", f"it is {image_format}: rename it to end in {EXTENSIONS[image_format][0]}"
    elif image_format is not None and image_format not in NOT_IMAGES:
        yield path, "not read", f"it is {image_format}; covpool reads {', '.join(EXTENSIONS)}"


# All kinds of problems, the worst first, with advice.
REMEDIES = {
    "unreadable": "download them again, or delete them",
    "truncated": "download them again, or delete them",
    "too large": "resize them, or delete them",
    "too slow": "save them as JPEG or PNG, or delete them",
    "format": "convert them to JPEG or PNG",
    "missing": "download them, or remove them from the list",
    "leak": "delete them from one split, or the measured accuracy is too high",
    "two labels": "remove them from the wrong classes",
    "duplicate": "delete all but one",
    "listed twice": "remove all rows but one, and keep the file",
    "black": "delete them, or save them brighter: covpool divides 16-bit gray by 256",
    "extension": "rename them: covpool reads them anyway, other programs may not",
    "not read": "rename or convert them, or they are not used",
    "no class": "move them into the folder of a class, or they are not used",
    "empty class": "add images, or remove the class",
    "single image": "add images: one is too few to learn a class",
}


@dataclass(frozen=True)
class Report:
    """The result of a check.

    Attributes:
        layout: layout of the data set.
        images: number of images per split.
        classes: number of classes.
        problems: the problems, the worst first.
        ignored: number of files that are no images, by extension.
    """

    layout: str
    images: Mapping[Split, int]
    classes: int
    problems: tuple[Problem, ...] = field(repr=False)
    ignored: Mapping[str, int] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """Number of problems of each kind, the worst first."""
        counts = Counter(problem.problem for problem in self.problems)
        return {problem: counts[problem] for problem in REMEDIES if counts[problem]}


def check(
    path: str | Path, layout: str = "auto", *, workers: int | None = None, progress: Progress | None = None
) -> Report:
    """Check every image of a data set.

    Args:
        path: the data set, as for :func:`covpool.data.sources.open_images`.
        layout: its layout, as for :func:`covpool.data.sources.open_images`.
        workers: number of threads (default: the number of cores).
        progress: called with the number of images done and the total.

    Raises:
        ValueError: if the path is not a data set or holds no images.
    """
    layout = layout_of(path) if layout == "auto" else layout
    sets = read_splits(path, layout)
    total = sum(map(len, sets.values()))
    if not total:
        raise UsageError(f"{path} has no images")
    if workers is not None and workers < 1:
        raise UsageError(f"workers must be at least 1; got {workers}")
    collection = Collection(sets)
    # Pillow can warn of odd metadata thousands of times, without naming the file.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        problems = [*collection.look_at_all(workers or available_cores(), progress), *collection.same()]
    problems += _class_problems(sets)
    ignored = Counter[str]()
    if layout == "folder":
        problems += [Problem(*stray) for stray in strays(Path(path), ignored)]
    rank = {problem: place for place, problem in enumerate(REMEDIES)}
    problems.sort(key=lambda problem: rank[problem.problem])
    classes = len(next(iter(sets.values())).classes)
    counts = {split: len(images) for split, images in sets.items()}
    return Report(layout, counts, classes, tuple(problems), +ignored)


def _class_problems(sets: Mapping[Split, ImageSet]) -> Iterator[Problem]:
    for split, images in sets.items():
        for name, count in zip(images.classes, class_counts(images).tolist(), strict=True):
            if not count:
                yield Problem(f"{split}/{name}", "empty class", f"the class has no image in {split}")
            elif count == 1 and split == "train":
                yield Problem(f"{split}/{name}", "single image", f"the class has one image in {split}")


HEADER = Problem._fields


def check_output(output: Path) -> None:
    """Raise unless a report can be written there; only an older report may be replaced."""
    if not output.parent.is_dir():
        raise UsageError(f"{output.parent} is not a folder: give --out a file in an existing folder")
    if not os.access(output.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(output.parent))
    if output.exists():
        with open_regular(output) as file:
            if file.readline(100).strip() != ",".join(HEADER).encode():
                raise UsageError(f"{output} exists and is not a report of covpool check: use another --out")


def write_report(problems: Sequence[Problem], output: Path) -> None:
    """Write the report as CSV, atomically."""
    replace_file(output, csv_text([HEADER, *problems]).encode(ENCODING, ERRORS))


def report_text(
    *,
    data: str,
    layout: str,
    images: Mapping[str, int],
    classes: int,
    problems: Mapping[str, int],
    ignored: Mapping[str, int],
    output: str,
) -> str:
    """Return the summary for a terminal: the data set, and the count and advice for each problem."""
    splits = ", ".join(f"{split} {count:,}" for split, count in images.items())
    total = sum(images.values())
    heading = f"{data}: layout {layout}, {counted(total, 'image')} ({splits}), {counted(classes, 'class')}"
    if ignored:
        kinds = ", ".join(
            f"{count:,} {name}" for name, count in sorted(ignored.items(), key=lambda kind: -kind[1])
        )
        heading += f"\nignored, since they are no images: {kinds}"
    if not problems:
        return f"{heading}\n\nNo problems found."
    rows = [("problem", "count", "what to do")]
    rows += [(problem, f"{count:,}", REMEDIES[problem]) for problem, count in problems.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [f"{a.ljust(widths[0])}  {b.rjust(widths[1])}  {c}" for a, b, c in rows]
    return "\n".join([heading, "", *table, "", f"{output} lists each one. No file was changed."])
