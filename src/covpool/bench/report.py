"""Table and plot beside a file of results, and the summary in a page, from that file alone."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from covpool.bench.plot import draw
from covpool.bench.results import read_results
from covpool.bench.table import markdown, summary


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


BEGIN, END = "<!-- benchmark:begin -->", "<!-- benchmark:end -->"


def summary_into(page: str | Path, path: str | Path) -> Path:
    """Write the summary of a results JSON between the two marks of a Markdown page."""
    page = Path(page)
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page} has no lines {BEGIN} and {END} to write between")
    block = f"{BEGIN}\n{summary(read_results(path))}\n{END}"
    page.write_text(before + block + after, encoding="utf-8")
    return page
