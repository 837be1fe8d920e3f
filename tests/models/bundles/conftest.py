"""A bundle for the tests of bundles, and copies of it to damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from covpool.models import PooledClassifier
from covpool.models.saving import save_model
from tests.models.bundles.samples import CLASSES, trained


@pytest.fixture(scope="module")
def model() -> PooledClassifier:
    torch.manual_seed(0)
    return trained()


@pytest.fixture(scope="module")
def saved(model: PooledClassifier, tmp_path_factory: pytest.TempPathFactory) -> Path:
    metrics, recipe = {"top1": 0.75, "per class": [1.0, 0.5, 0.75]}, {"optimizer": {"name": "sgd", "lr": 0.1}}
    folder = tmp_path_factory.mktemp("saved") / "birds"
    return save_model(model, folder, classes=CLASSES, metrics=metrics, recipe=recipe)


@pytest.fixture(scope="module")
def other() -> PooledClassifier:
    """Return a model of the same shape with other weights."""
    torch.manual_seed(1)
    return trained()


@pytest.fixture
def bundle(saved: Path, tmp_path: Path) -> Path:
    """Return a copy to damage."""
    return Path(shutil.copytree(saved, tmp_path / "birds"))
