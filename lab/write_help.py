"""Write the help of every verb into a file, for the wheel: ``python -m lab.write_help FILE``.

The help is made from the options' dataclasses, whose files import torch, so a build cannot make it: its
environment has no torch. ``COVPOOL_HELP`` names the file to ``hatch_build.py``.
"""

from __future__ import annotations

import sys

from covpool.cli.main import HELP_MARK, VERBS, help_of
from covpool.storage.files import replace_file


def make_help() -> str:
    """Return the help of all verbs."""
    return "\n".join(f"{HELP_MARK}{verb}\n{help_of(verb)}\n" for verb in VERBS)


if __name__ == "__main__":
    replace_file(sys.argv[1], make_help().encode())
