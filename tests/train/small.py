"""A run of a few seconds: a network made for tests, and some images of tiny10."""

from __future__ import annotations

from typing import Any

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
