"""``covpool reproduce``: see :mod:`covpool.reproduce`."""

# Annotations are not postponed here: jsonargparse would import what is for type checkers to evaluate them.
import logging
import sys
from dataclasses import dataclass
from pathlib import Path

EXAMPLE = "covpool reproduce page --out results --page results.md"


@dataclass(frozen=True)
class Arguments:
    """Reproduce a table or a figure of the paper in miniature, and evaluate its claims.

    Small networks train on a part of Tiny-ImageNet, each in minutes. Rerun the command to resume. It writes
    a JSON of all runs, a CSV, a page and a figure.

    Attributes:
        experiment: ``figure2``, ``table2``, ``table3``, ``table4``, ``figure4``, ``table5``, ``table6`` or
            ``approximation``; ``all`` of them; ``draw``, to write tables and figures again from the results;
            or ``page``, to write the page that compares the paper's figures with ours.
        data: folder tiny-imagenet-200, as shipped.
        runs: folder of the training runs.
        out: results folder.
        seeds: number of random seeds per row.
        budget: time limit, as ``8h``; covpool trains fewer seeds if the time is too short for all.
        add: add seeds to the results in ``--out``, without training their runs again.
        page: page to write.
    """

    experiment: str
    data: Path | None = None
    runs: Path = Path("runs/reproduce")
    out: Path = Path("results")
    seeds: int = 3
    budget: str | None = None
    add: bool = False
    page: Path = Path("docs/results.md")


@dataclass(frozen=True)
class Written:
    """The files written, and the pages to print."""

    files: tuple[str, ...]
    report: str = ""


def run(arguments: Arguments) -> Written:
    """Train, measure, and write the results."""
    from covpool.reproduce.runner import draw, run_all, write_page
    from covpool.terminal import Progress

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    if arguments.experiment == "page":
        return Written((str(write_page(arguments.out, arguments.page)),))
    if arguments.experiment == "draw":
        return Written(tuple(map(str, draw(arguments.out))))
    files = run_all(
        arguments.experiment,
        data=arguments.data,
        runs=arguments.runs,
        out=arguments.out,
        seeds=arguments.seeds,
        budget=arguments.budget,
        add=arguments.add,
        tell=lambda sentence: print(sentence, file=sys.stderr, flush=True),
        progress=Progress,
    )
    pages = [path for path in files if path.suffix == ".md"]
    return Written(tuple(map(str, files)), "\n\n".join(path.read_text(encoding="utf-8") for path in pages))


def text(result: Written) -> str:
    """Return the pages and the paths of the files."""
    return "\n".join([*([result.report] if result.report else []), *result.files])
