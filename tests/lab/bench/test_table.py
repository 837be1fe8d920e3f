"""The report tables, made from made-up results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from covpool.provenance import Results, check_schema
from lab.bench.methods_page import render
from lab.bench.table import aligned, sections
from tests.lab.bench.made_up import results_of, size, steps

GROWING = [steps(8, 2.0, 2.2), steps(32, 4.0, 4.8)]


def test_made_up_results_follow_the_schema(methods_results: Results) -> None:
    made_up = results_of(methods_results, {"13x13": size({"mpn_cov": 1.3})}, GROWING)
    check_schema(made_up, "lab", "methods")


def test_tables_have_the_paper_beside_ours(methods_results: Results) -> None:
    there = size({"mpn_cov": 1.3, "gap": 0.01})
    rows = "\n".join(sections(results_of(methods_results, {"13x13": there}, GROWING))).splitlines()
    assert "| `mpn_cov` | 1.30 (0.65) | 1.30 [1.23, 1.37] | 1.00 | 2.58 (2.41) | 1.83 | 0.377 |" in rows
    assert "| `isqrt_cov` | 1.00 (0.50) | 1.00 [0.95, 1.05] | 1.00 | 1.41 (0.41) | 1.00 | 1.129 |" in rows
    (eigh,) = [row for row in rows if row.startswith("| 13x13") and "| `eigh` |" in row]
    assert eigh.endswith("| 21.3 | 1.8 | 9.8 |")
    (step,) = [row for row in rows if row.startswith("| 32 | `mpn_cov` |")]
    assert step.startswith("| 32 | `mpn_cov` | 6.67 [6.06, 7.41] | 1.20 [")


def test_the_paper_stands_beside_its_own_size_alone(methods_results: Results) -> None:
    tables = "\n".join(sections(results_of(methods_results, {"14x14": size({"mpn_cov": 1.3})})))
    assert "| `mpn_cov` | 1.30 (0.65) | 1.30 [1.23, 1.37] | 1.00 |\n" in tables
    assert "paper: MB" not in tables


def test_every_row_of_a_table_has_the_cells_of_its_header(methods_results: Results) -> None:
    results = results_of(methods_results, {"13x13": size({"mpn_cov": 1.3})}, GROWING)
    cells = None
    for line in "\n".join(sections(results)).splitlines():
        cells = (cells or line.count("|")) if line.startswith("|") else None
        assert cells is None or line.count("|") == cells, line


@pytest.mark.parametrize("name", ["isqrt_cov", None])
def test_results_of_another_experiment_are_refused(name, methods_results: Results, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text(json.dumps({**methods_results, "experiment": name}))
    with pytest.raises(ValueError, match=f"has the results of {name}, not of methods"):
        render(file)


def test_tables_are_aligned_for_a_terminal() -> None:
    page = "words | here\n\n| a | bcd |\n| --- | --- |\n| efgh |  |\n\nend"
    assert aligned(page) == "words | here\n\n| a    | bcd |\n| ---- | --- |\n| efgh |     |\n\nend"
