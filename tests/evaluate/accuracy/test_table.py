"""Results for a terminal."""

from __future__ import annotations

from typing import Any

import pytest

from covpool.evaluate.accuracy import TITLES, results_table


@pytest.mark.parametrize(("classes", "told"), [(5, False), (6, True)])
def test_five_guesses_are_told_where_they_may_be_wrong(classes: int, told: bool) -> None:
    results: dict[str, Any] = {
        "images": 20,
        "data": {"split": "test", "classes": classes},
        "metrics": {**dict.fromkeys(TITLES, 1.0), "loss": 0.5},
        "intervals": {"top1": (0.9, 1.0)},
    }
    lines = results_table(results).splitlines()
    assert any(line.startswith("top-5") for line in lines) is told
    assert lines[3] == "top-1                      100.0    90.0 to 100.0"
