from __future__ import annotations

import json
from typing import Any

from covpool.training.recipe_files import read_recipe
from lab.experiments.classifier_rate import SWEEPS, chosen, table
from tests.pages import ROOT, needs_pages


def row(factor: int, seed: int, held_out: float, test: float) -> dict[str, Any]:
    optimizer, epochs, pooling = next(iter(SWEEPS))
    return {"optimizer": optimizer, "epochs": epochs, "pooling": pooling, "factor": factor, "seed": seed} | {
        "held_out": held_out,
        "test": test,
    }


def test_the_factor_is_chosen_on_held_out_images() -> None:
    rows = [row(1, 0, 0.5, 0.9), row(4, 0, 0.6, 0.4), row(16, 0, 0.5, 0.4)]
    rows += [row(1, 1, 0.5, 0.9), row(4, 1, 0.4, 0.5), row(16, 1, 0.6, 0.6)]
    rows += [row(4, 2, 0.9, 0.9)]  # the other factors do not have this seed yet
    assert table(rows).splitlines()[-3:] == [
        "| SGD | 5 | isqrt_cov | 1 | 2 | 50.0 ± 0.0 | 90.0 ± 0.0 |",
        "| SGD | 5 | isqrt_cov | 4 | 2 | 50.0 ± 14.1 | 45.0 ± 7.1 |",
        "| SGD | 5 | isqrt_cov | **16** | 2 | 55.0 ± 7.1 | 50.0 ± 14.1 |",
    ]


@needs_pages
def test_the_factor_of_modern_is_the_one_chosen() -> None:
    (file,) = (ROOT / "results" / "0.1.0").glob("classifier_rate--*.json")
    rows = json.loads(file.read_bytes())["rows"]
    found = {chosen(rows, sweep) for sweep in SWEEPS if sweep[0].startswith("modern")}
    assert found == {read_recipe("modern").optimizer.classifier_factor}
