"""Measure and draw, or draw what was measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from covpool.durable import replace_file
from covpool.reproduce.why_second_order import run, table
from covpool.reproduce.why_second_order.picture import draw


def main(arguments: list[str]) -> None:
    """See the package."""
    data, *weights, results, picture = map(Path, arguments)
    if weights:
        made = run(data, *weights)
        replace_file(results.with_suffix(".json"), json.dumps(made, indent=None).encode() + b"\n")
        replace_file(results.with_suffix(".md"), f"{table(made)}\n".encode())
    else:
        made = json.loads(results.read_bytes())
    replace_file(picture, draw(made, data))
    print(table(made))


if __name__ == "__main__":
    main(sys.argv[1:])
