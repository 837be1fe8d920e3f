"""Every pooling method in a training run, selected by one option of the recipe."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import covpool
from covpool.nn.pooling import METHODS
from covpool.training import read_recipe, train_recipe
from tests.data.pictures import needs_tiny10
from tests.training.small import SMALL

OPTIONS: dict[str, dict[str, Any]] = {
    "cbp": {"features": 64},
    "moment_probing": {"width": 28},
}
FAST = ("moment_probing",)  # it has its own parameters


@needs_tiny10
@pytest.mark.parametrize(
    "pool", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in METHODS]
)
@pytest.mark.usefixtures("_no_report")
def test_trains_and_is_read_back(pool: str, tmp_path: Path) -> None:
    changes = {"model.pool": pool, "model.pool_options": OPTIONS.get(pool, {}), "out": str(tmp_path / "run")}
    if pool == "gap":
        changes["model.dim"] = "auto"
    run = train_recipe(
        read_recipe(None, {**SMALL, "loop.precision": "bfloat16", "loop.ema": None, **changes})
    )
    assert run.summary["skipped_steps"] == 0
    assert math.isfinite(run.summary["last_epoch"]["loss"])
    model = covpool.load_model(run.folder / "bundle")
    assert model.pool.pool == pool
