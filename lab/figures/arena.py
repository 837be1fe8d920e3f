"""Write the tables of heads in docs/benchmarks.md from the results: ``python -m lab figures arena``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lab.experiments.arena import TRAINED, case_named, rows
from lab.record import ROOT, committed_file, read_record, with_block

PAGE = ROOT / "docs" / "benchmarks.md"


def tables() -> str:
    """Return a table of the contest per data set and backbone, large images and large sets first."""
    cases = [case for case in read_record(committed_file("arena"))["cases"] if len(case["heads"]) > 1]
    return "\n\n".join(table(case) for case in sorted(cases, key=place))


def place(results: dict[str, Any]) -> tuple[bool, int, int]:
    """Return the sort key of a table."""
    case = case_named(results["case"])
    return case.longer, -case.size, -TRAINED[case.data]


def table(case: dict[str, Any]) -> str:
    """Return the table of one data set with one backbone."""
    seeds = case["heads"][0]["seeds"]
    return "\n".join([f"**{case_named(case['case']).title}**, {seeds} seeds:", "", *rows(case, short=True)])


def page(text: str) -> str:
    """Return the page with new tables."""
    return with_block(text, "arena", tables())


def write_pages() -> list[Path]:
    """Write the tables of heads in docs/benchmarks.md."""
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
    return [PAGE]
