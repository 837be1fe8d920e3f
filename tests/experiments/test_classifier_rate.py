from __future__ import annotations

from typing import Any

from experiments.classifier_rate import SWEEPS, table


def row(factor: int, seed: int, held_out: float, test: float) -> dict[str, Any]:
    optimizer, epochs, pooling = next(iter(SWEEPS))
    return {"optimizer": optimizer, "epochs": epochs, "pooling": pooling, "factor": factor, "seed": seed} | {
        "held_out": held_out,
        "test": test,
    }


def test_the_factor_is_chosen_on_held_out_images() -> None:
    rows = [row(1, 0, 0.5, 0.9), row(4, 0, 0.5, 0.4), row(4, 1, 0.6, 0.5)]
    assert table(rows).splitlines()[-2:] == [
        "| SGD | 5 | isqrt_cov | 1 | 1 | 50.0 | 90.0 |",
        "| SGD | 5 | isqrt_cov | **4** | 2 | 55.0 ± 7.1 | 45.0 ± 7.1 |",
    ]
