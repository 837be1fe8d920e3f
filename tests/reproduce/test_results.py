"""The committed results of experiments are what their code would print."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from covpool.reproduce import bulk, exports, fine_grained, fine_tuning, sparrows, spectra, tiny10

RESULTS = Path(__file__).parents[2] / "results"


EXPERIMENTS = [bulk, exports, fine_grained, fine_tuning, sparrows, spectra, tiny10]


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda module: module.__name__)
def test_tables_are_made_from_the_figures(experiment: object) -> None:
    name = experiment.__name__.rpartition(".")[2]  # type: ignore[attr-defined]
    files = sorted(RESULTS.glob(f"*/{name}--*.json"))
    if not files:
        pytest.skip("there are no results beside the tests")
    for file in files:
        results = json.loads(file.read_bytes())
        assert file.with_suffix(".md").read_text() == f"{experiment.table(results)}\n"  # type: ignore[attr-defined]


def test_the_page_on_probing_quotes_the_results() -> None:
    page = (RESULTS.parent / "docs" / "probing.md").read_text(encoding="utf-8")
    tables = "".join(file.read_text(encoding="utf-8") for file in RESULTS.glob("*/fine_grained--*.md"))
    if not tables:
        pytest.skip("there are no results beside the tests")
    measured = page.partition("## Measured")[2].partition("## From Python")[0]
    quoted = re.findall(r"\d\d\.\d(?: ± \d\.\d)?", measured)
    assert len(quoted) > 10
    assert [number for number in quoted if number not in tables] == []


def test_a_row_has_mean_and_deviation() -> None:
    base = dict.fromkeys(("seed", "parameters", "seconds", "source", "versions", "machine"))
    runs = [{**base, "last_epoch": {"top1": t}, "metrics": {"top1": t + 0.1}} for t in (0.5, 0.6, 0.7)]
    row = tiny10._row("gap", runs)
    assert (row["mean"], row["sd"]) == (pytest.approx(0.6), pytest.approx(0.1))
    assert "| gap | 60.0 ± 10.0 | 50.0, 60.0, 70.0 |" in tiny10.table({"rows": [row]})
