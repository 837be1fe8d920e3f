"""Measure, and write the figures and their tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from covpool.durable import replace_file
from covpool.reproduce.bulk import run, table


def main(arguments: list[str]) -> None:
    """See the package."""
    photos, results = map(Path, arguments)
    made = run(photos)
    replace_file(results.with_suffix(".json"), json.dumps(made, indent=1).encode())
    replace_file(results.with_suffix(".md"), f"{table(made)}\n".encode())
    print(table(made))


if __name__ == "__main__":
    main(sys.argv[1:])
