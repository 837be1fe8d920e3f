"""The divided classifier: the bytes that processes hold and send match the formulas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.bench import sharded
from lab.record import shown_file

ROOT = Path(__file__).parents[3]
RESULTS = shown_file(ROOT / "results" / "0.1.0", "sharded")


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_bytes_held_and_sent_are_those_of_the_formulas(processes: int) -> None:
    sizes = {"classes": 700, "features": 256, "images": 6 * processes}
    found = sharded.together(sharded.measure_traffic, processes, **sizes)
    for kind, one in found.items():
        expected = sharded.formulas({"processes": processes, **sizes, "kind": kind})
        assert one["held"] == expected["held"]
        # Each message has a short header, and the number of images is sent too.
        assert expected["sent"] <= one["sent"] * 1.001
        assert one["sent"] <= expected["sent"] * 1.01 + 2500 * processes


def test_a_classifier_learns_its_batch() -> None:
    found = sharded.together(sharded.measure_largest, 2, classes=50, features=32, images=8, steps=5)
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert found["losses"][-1] < found["losses"][0]


@pytest.mark.skipif(RESULTS is None, reason="the benchmark has not run")
def test_the_page_has_the_results() -> None:
    assert RESULTS is not None
    results = json.loads(RESULTS.read_text())
    text = sharded.PAGE.read_text(encoding="utf-8")
    assert sharded.page(text, results) == text, "python -m lab figures sharded writes the page"
    drawn = {line.get_label(): line.get_ydata() for line in sharded.draw(results).axes[1].get_lines()}
    assert len(drawn) == 4
    assert drawn["sharded, 4 processes"][-1] < drawn["dense, 4 processes"][-1] / 1000
    assert sharded.FIGURE.stat().st_size > 10_000
    for row in results["traffic"]:
        expected = sharded.formulas(row)
        assert row["held"] == expected["held"]
        assert row["sent"] == pytest.approx(expected["sent"], rel=0.01, abs=10_000)
