"""Measure and draw, or draw what was measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from covpool.durable import replace_file
from covpool.reproduce.spectra import run, table
from covpool.reproduce.spectra.picture import draw


def main(arguments: list[str]) -> None:
    """See the package."""
    *measured, results, picture = map(Path, arguments)
    if measured:
        data, weights = measured
        made = run(data, weights)
        replace_file(results.with_suffix(".json"), json.dumps(made, indent=1).encode())
        replace_file(results.with_suffix(".md"), f"{table(made)}\n".encode())
    else:
        made = json.loads(results.read_bytes())
    draw(made, picture)
    print(table(made))


if __name__ == "__main__":
    main(sys.argv[1:])
