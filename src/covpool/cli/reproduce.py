"""``covpool reproduce``: see :mod:`covpool.reproduce`."""

# Annotations are not postponed: jsonargparse would import the modules under TYPE_CHECKING to evaluate them.
import logging
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

EXAMPLE = "covpool reproduce figure4 --data tiny-imagenet-200 --seeds 1"


@dataclass(frozen=True)
class Arguments:
    """Reproduce a table or a figure of the paper in miniature.

    Small networks train on a part of Tiny-ImageNet, each in minutes. Rerun the command to resume. It writes
    a JSON and a CSV of all runs, and prints the table.

    Attributes:
        experiment: ``figure2``, ``table2``, ``table3``, ``table4``, ``figure4``, ``table5``, ``table6`` or
            ``approximation``; or ``all`` of them.
        data: folder tiny-imagenet-200, as shipped.
        runs: folder of the training runs.
        out: results folder.
        seeds: number of random seeds per row.
        budget: time limit, as ``8h``; covpool trains fewer seeds if the time is too short for all.
        add: add seeds to the results in ``--out``, without training their runs again.
    """

    experiment: str
    data: Path | None = None
    runs: Path = Path("runs/reproduce")
    out: Path = Path("runs/reproduce")
    seeds: int = 3
    budget: str | None = None
    add: bool = False


@dataclass(frozen=True)
class Written:
    """The files of results, and their tables."""

    files: tuple[str, ...]
    report: str


def run(arguments: Arguments) -> Written:
    """Train, measure, and write the results."""
    from covpool.reproduce.runner import report, run_all
    from covpool.terminal import Progress

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    options = asdict(arguments)
    files = run_all(
        options.pop("experiment"),
        **options,
        log=lambda sentence: print(sentence, file=sys.stderr, flush=True),
        progress=Progress,
    )
    return Written(tuple(map(str, files)), "\n\n".join(map(report, files)))


def text(result: Written) -> str:
    """Return the tables and the paths of the files."""
    return "\n".join([result.report, "", *result.files])
