"""Table and plot beside a file of results, and the summary in a page, from that file alone."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from covpool.bench import plot, table
from covpool.bench.methods import plot as methods_plot
from covpool.bench.methods import table as methods_table
from covpool.bench.results import Results, read_results
from covpool.errors import UsageError

_DRAW = {"isqrt_cov": plot.draw, "methods": methods_plot.draw}
_MARKDOWN = {"isqrt_cov": table.markdown, "methods": methods_table.markdown}


def render(path: str | Path) -> list[Path]:
    """Write ``.md`` and, where matplotlib is installed, ``.png`` next to a results JSON.

    Returns:
        The files written.
    """
    path = Path(path)
    results = read_results(path)
    written = []
    picture = None
    if find_spec("matplotlib") is not None and _has_figures(results):
        picture = path.with_suffix(".png")
        _DRAW[results["suite"]](results, picture)
        written.append(picture)
    page = path.with_suffix(".md")
    text = _MARKDOWN[results["suite"]](results, picture.name if picture else None)
    page.write_text(text, encoding="utf-8")
    return [page, *written]


def _has_figures(results: Results) -> bool:
    return any(results.get(part) for part in ("sizes", "layers", "training"))


BEGIN, END = "<!-- benchmark:begin -->", "<!-- benchmark:end -->"


def summary_into(page: str | Path, path: str | Path) -> Path:
    """Write the summary of a results JSON between the two marks of a Markdown page."""
    page = Path(page)
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise UsageError(f"{page} has no lines {BEGIN} and {END} to write between")
    block = f"{BEGIN}\n{table.summary(read_results(path))}\n{END}"
    page.write_text(before + block + after, encoding="utf-8")
    return page
