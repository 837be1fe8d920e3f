"""``covpool demo``: see :func:`covpool.demo.training.run_demo`."""

# Annotations are not postponed: jsonargparse would import the modules under TYPE_CHECKING to evaluate them.
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLE = "covpool demo"


@dataclass(frozen=True)
class Arguments:
    """Show the idea of covariance pooling, without data or download, in under a minute on two cores.

    It makes images whose classes have the same mean color and different covariances. It trains one small
    network twice, with average pooling and with isqrt_cov, and writes a page with images, accuracy,
    eigenvalues and evidence maps. The images are made to show the idea; docs/probing.md and docs/results.md
    have measurements on photographs.

    Attributes:
        out: folder of report.html and results.json.
        seeds: number of random seeds; each has its own images.
    """

    out: Path = Path("runs/demo")
    seeds: int = 3


@dataclass(frozen=True)
class Result:
    """The page, and the contents of ``results.json``."""

    page: str
    record: dict[str, Any]


def run(arguments: Arguments) -> Result:
    """Train, and write the page."""
    from covpool.demo.training import PAGE, run_demo
    from covpool.functional.arguments import check_whole
    from covpool.terminal import Progress

    check_whole("--seeds", arguments.seeds)
    with Progress("epochs") as progress:
        record = run_demo(arguments.out, seeds=arguments.seeds, progress=progress)
    return Result(str(arguments.out / PAGE), record)


def text(result: Result) -> str:
    """Return a table, and the path of the page."""
    from covpool.terminal import aligned

    record = result.record
    rows = [["top-1 in %", *(f"seed {run['seed']}" for run in record["runs"]), "mean"]]
    for name, mean in record["top1"].items():
        cells = [f"{100 * run['accuracy'][name][-1]:.1f}" for run in record["runs"]]
        rows.append([name, *cells, f"{100 * mean:.1f}"])
    return "\n".join(
        [
            aligned(rows),
            f"chance is {record['chance']:.1%}",
            "",
            "These images are made to show the idea. docs/probing.md and docs/results.md have measurements",
            "on photographs; covpool fit FOLDER compares both poolings on your images.",
            "",
            f"report: {result.page}",
        ]
    )
