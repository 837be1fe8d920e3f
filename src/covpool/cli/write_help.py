"""Write the help of every verb into a file, for the wheel: ``python -m covpool.cli.write_help FILE``.

The help is made from the options' dataclasses, whose files import torch, so a build cannot make it: its
environment has no torch. ``COVPOOL_HELP`` names the file to ``hatch_build.py``.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from unittest import mock

from covpool.cli.main import HELP_MARK, VERBS, _output
from covpool.storage.files import replace_file


def help_of(verb: str) -> str:
    """Return the help of a verb, 100 columns wide."""
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "102"}),
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.suppress(SystemExit),
    ):
        _output(verb, ["--help"])
    return printed.getvalue().strip()


def make_help() -> str:
    """Return the help of all verbs."""
    return "\n".join(f"{HELP_MARK}{verb}\n{help_of(verb)}\n" for verb in VERBS)


if __name__ == "__main__":
    replace_file(sys.argv[1], make_help().encode())
