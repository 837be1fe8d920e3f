"""Table and plot beside a file of results, from that file alone."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from covpool.bench.plot import draw
from covpool.bench.results import read_results
from covpool.bench.table import markdown


def render(path: str | Path) -> list[Path]:
    """Write ``.md`` and, where matplotlib is installed, ``.png`` next to a results JSON.

    Returns:
        The files written.
    """
    path = Path(path)
    results = read_results(path)
    written = []
    picture = None
    if find_spec("matplotlib") is not None and results["sizes"]:
        picture = path.with_suffix(".png")
        draw(results, picture)
        written.append(picture)
    table = path.with_suffix(".md")
    table.write_text(markdown(results, picture.name if picture else None), encoding="utf-8")
    return [table, *written]
