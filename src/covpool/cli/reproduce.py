"""``covpool reproduce``: see :mod:`covpool.reproduce`."""

# Annotations are not postponed here: jsonargparse would import what is for type checkers to evaluate them.
import logging
import sys
from dataclasses import dataclass
from pathlib import Path

EXAMPLE = "covpool reproduce page --out results --page results.md"


@dataclass(frozen=True)
class Arguments:
    """Run a table or a figure of the paper again, in miniature, and judge its claims.

    Networks learn a part of Tiny-ImageNet, each in minutes, one after the other; stopped, the same command
    goes on. Written are a JSON of all runs, a CSV, a page and a figure.

    Attributes:
        experiment: ``figure2``, ``table2``, ``table3``, ``table4``, ``figure4``, ``table5``, ``table6``,
            ``approximation``, ``table7``; ``all`` of them; ``draw``, to draw anew what was measured; or
            ``page``, to write the page that puts the paper's figures and ours side by side.
        data: the folder tiny-imagenet-200, as it is shipped.
        sets: for ``table7``, a folder with cub, cars, flowers and sparrows, each by class.
        runs: a folder for training runs.
        out: the folder of results.
        seeds: of every row that a claim rests on.
        budget: of time, as ``8h``: fewer seeds where it is not enough for all.
        add: to the results in ``--out``: runs that they hold are not trained again.
        page: to write.
    """

    experiment: str
    data: Path | None = None
    sets: Path | None = None
    runs: Path = Path("runs/reproduce")
    out: Path = Path("results")
    seeds: int = 3
    budget: str | None = None
    add: bool = False
    page: Path = Path("docs/results.md")


@dataclass(frozen=True)
class Written:
    """The files, and what to say of them."""

    files: tuple[str, ...]
    report: str = ""


def run(arguments: Arguments) -> Written:
    """Train, measure and write."""
    from covpool.progress import Progress
    from covpool.reproduce.command import draw, run_all, write_page

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    if arguments.experiment == "page":
        return Written((str(write_page(arguments.out, arguments.page)),))
    if arguments.experiment == "draw":
        return Written(tuple(map(str, draw(arguments.out))))
    files = run_all(
        arguments.experiment,
        data=arguments.data,
        sets=arguments.sets,
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
    """The pages, and where everything is."""
    return "\n".join([*([result.report] if result.report else []), *result.files])
