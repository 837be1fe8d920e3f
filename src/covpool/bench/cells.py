"""The words, numbers and tables that reports in Markdown are made of."""

from __future__ import annotations

from covpool.bench.results import Results


def machine_words(results: Results) -> str:
    """The machine in a few words."""
    machine = results["machine"]
    if machine["gpu"] is not None:
        return str(machine["gpu"])
    amx = " with AMX" if "amx_tile" in machine["flags"] else ""
    return f"{machine['cores']} core{'s' if machine['cores'] > 1 else ''} of {machine['cpu']}{amx}"


def source_words(results: Results) -> str:
    """The code that was measured, and what it ran on."""
    source, versions = results["source"], results["versions"]
    commit = source["commit"][:12] if source["commit"] else "none"
    changed = " with uncommitted changes" if source["dirty"] else ""
    return (
        f"covpool {versions['covpool']} (commit {commit}{changed}), torch {versions['torch']}, "
        f"{results['machine']['threads']} threads"
    )


def with_quartiles(median: float, q1: float, q3: float) -> str:
    """A median, with its quartiles in brackets."""
    if q1 == q3:
        return number(median)
    return f"{number(median)} [{number(q1)}, {number(q3)}]"


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def table(titles: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def aligned(markdown: str) -> str:
    """The same page with the columns of its tables one below the other, for a terminal."""
    lines: list[str] = []
    rows: list[list[str]] = []
    for line in [*markdown.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
            continue
        lines += _padded(rows)
        rows = []
        lines.append(line)
    return "\n".join(lines[:-1])


def _padded(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    made = []
    for row in rows:
        ruled = set(row) == {"---"}
        cells = ["-" * width if ruled else cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        made.append(f"| {' | '.join(cells)} |")
    return made
