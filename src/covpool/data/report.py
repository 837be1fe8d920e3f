"""What ``covpool check`` found, as a file and as text."""

from __future__ import annotations

import csv
import errno
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from covpool.data.check import REMEDIES
from covpool.data.collection import Problem
from covpool.data.counts import counted
from covpool.data.names import ENCODING, ERRORS
from covpool.durable.replacing import replace_file

HEADER = Problem._fields


def check_output(output: Path) -> None:
    """Raise unless a report may be written there: in place of an older one, but of nothing else."""
    if not output.parent.is_dir():
        raise ValueError(f"{output.parent} is no folder that a report could go into")
    if not os.access(output.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(output.parent))
    if output.exists():
        with output.open("rb") as file:
            if file.readline(100).strip() != ",".join(HEADER).encode():
                raise ValueError(f"{output} exists and is no report of covpool check: it is not written over")


def write_report(problems: Sequence[Problem], output: Path) -> None:
    """Write a CSV, which takes its name when it is whole."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([HEADER, *problems])
    replace_file(output, text.getvalue().encode(ENCODING, ERRORS))


def report_text(
    *,
    data: str,
    layout: str,
    images: Mapping[str, int],
    classes: int,
    problems: Mapping[str, int],
    output: str,
) -> str:
    """What was looked at, what was found, how often, and what to do about it."""
    splits = ", ".join(f"{split} {count:,}" for split, count in images.items())
    total = sum(images.values())
    heading = f"{data}: layout {layout}, {counted(total, 'image')} ({splits}), {counted(classes, 'class')}"
    if not problems:
        return f"{heading}\n\nNothing was found to complain of."
    rows = [("problem", "count", "what to do")]
    rows += [(problem, f"{count:,}", REMEDIES[problem]) for problem, count in problems.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [f"{a.ljust(widths[0])}  {b.rjust(widths[1])}  {c}" for a, b, c in rows]
    return "\n".join([heading, "", *table, "", f"Each is listed in {output}. No file was changed."])
