"""Write help.txt, the help of every verb: ``python -m covpool.cli.write_help``.

The help is made from the options' dataclasses, whose files import torch. Reading it takes milliseconds.
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from unittest import mock

from covpool.cli.main import HELP_MARK, VERBS, _output
from covpool.storage.files import replace_file


def make_help() -> str:
    """Return the help of all verbs, 100 columns wide."""
    parts = []
    with mock.patch.dict(os.environ, {"COLUMNS": "102"}):
        for verb in VERBS:
            with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
                _output(verb, ["--help"])
            parts.append(f"{HELP_MARK}{verb}\n{printed.getvalue().strip()}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    replace_file(Path(__file__).with_name("help.txt"), make_help().encode())
