"""A run of a few seconds, with a network made for tests and some images of tiny10."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from covpool.training.recipe_files import read_recipe
from covpool.training.run import Run, train_recipe
from tests.data.pictures import TINY10

SMALL: dict[str, Any] = {
    "data.path": str(TINY10),
    "data.limit": 40,
    "data.workers": 0,
    "model.backbone": "test_resnet",
    "model.dim": 8,
    "model.image_size": 64,
    "batch_size": 8,
    "schedule.epochs": 2,
    "trackers": [],
}


def train(out: Path, changes: dict[str, Any] | None = None) -> Run:
    return train_recipe(read_recipe(None, {**SMALL, "out": str(out), **(changes or {})}))


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))
