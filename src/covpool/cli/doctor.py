"""``covpool doctor``: see :func:`covpool.doctor.examine`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from covpool.errors import UsageError

if TYPE_CHECKING:
    from covpool.doctor import Examination

EXAMPLE = "covpool doctor"


@dataclass(frozen=True)
class Arguments:
    """Print the installed versions, and test them, in half a minute at most.

    It prints versions, devices, extras, and a line for every test: pass, fail, or skip for an optional part.
    The exit code is 1 if a test failed.
    """


def parse(words: Sequence[str]) -> tuple[Arguments, bool]:
    """Parse by argparse, because jsonargparse may be missing."""
    parser = argparse.ArgumentParser(
        prog="covpool doctor",
        description=Arguments.__doc__,
        epilog=f"example:\n  {EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error")
    known, others = parser.parse_known_args(words)
    if others:
        raise UsageError(f"unrecognized arguments: {' '.join(others)}; the only option is --json")
    return Arguments(), known.json


def run(arguments: Arguments) -> Examination:
    """Run the tests."""
    from covpool.doctor import examine
    from covpool.terminal import Progress

    with Progress("tests") as progress:
        return examine(progress)


def text(result: Examination) -> str:
    """Return the versions, and a line for every test."""
    from covpool.doctor.examination import examination_text

    return examination_text(result)


def exit_code(result: Examination) -> int:
    """Return 1 if a test failed."""
    return int(not result.is_well)
