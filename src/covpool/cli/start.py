"""``covpool demo`` and ``doctor``: see :mod:`covpool.demo` and :mod:`covpool.doctor`."""

# Annotations are not postponed: jsonargparse would import the modules under TYPE_CHECKING to evaluate them.
import argparse
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covpool.cli.main import Command
from covpool.errors import UsageError

if TYPE_CHECKING:
    from covpool.doctor import Examination


@dataclass(frozen=True)
class DemoArguments:
    """Show the idea of covariance pooling, without data or download, in under a minute on two cores.

    It makes images whose classes have the same mean color and different covariances. It solves one small
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
class DemoResult:
    """The page, and the contents of ``results.json``."""

    page: str
    record: dict[str, Any]


def run_demo(arguments: DemoArguments) -> DemoResult:
    """Solve both networks, and write the page."""
    from covpool.arguments import check_whole
    from covpool.demo import PAGE, run_demo
    from covpool.terminal import Progress

    check_whole("--seeds", arguments.seeds)
    with Progress("networks") as progress:
        record = run_demo(arguments.out, seeds=arguments.seeds, progress=progress)
    return DemoResult(str(arguments.out / PAGE), record)


def text_of_demo(result: DemoResult) -> str:
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


demo = Command(DemoArguments, "covpool demo", run_demo, text_of_demo)


@dataclass(frozen=True)
class DoctorArguments:
    """Print the installed versions, and test them, in half a minute at most.

    It prints versions, devices, extras, and a line for every test: pass, fail, or skip for an optional part.
    The exit code is 1 if a test failed.
    """


def parse_doctor(words: Sequence[str]) -> tuple[DoctorArguments, bool]:
    """Parse by argparse, because jsonargparse may be missing."""
    parser = argparse.ArgumentParser(
        prog="covpool doctor",
        description=DoctorArguments.__doc__,
        epilog=f"example:\n  {doctor.EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    parser.add_argument("--quiet", action="store_true", help="print no progress")
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error")
    known, others = parser.parse_known_args(words)
    if others:
        raise UsageError(
            f"unrecognized arguments: {' '.join(others)}; the options are --json, --quiet and --debug"
        )
    return DoctorArguments(), known.json


def run_doctor(arguments: DoctorArguments) -> "Examination":
    """Run the tests."""
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # of torch, where NumPy is missing

    from covpool.doctor import examine
    from covpool.terminal import NamedProgress

    with NamedProgress() as progress:
        progress.log("testing this machine for half a minute at most, longest with torch.compile")
        return examine(progress)


def text_of_doctor(result: "Examination") -> str:
    """Return the versions, and a line for every test."""
    from covpool.doctor import examination_text

    return examination_text(result)


def exit_code_of_doctor(result: "Examination") -> int:
    """Return 1 if a test failed."""
    return int(not result.is_well)


doctor = Command(
    DoctorArguments,
    "covpool doctor",
    run_doctor,
    text_of_doctor,
    parse=parse_doctor,
    exit_code=exit_code_of_doctor,
)
