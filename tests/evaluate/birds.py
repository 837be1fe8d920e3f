"""Some photographs of sparrows, and a bundle with random weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from covpool.models import create_model, save_model
from tests.data.pictures import SPARROWS

CLASSES = ("113.Baird_Sparrow", "114.Black_throated_Sparrow", "118.House_Sparrow", "120.Fox_Sparrow")
CLASSES += ("128.Seaside_Sparrow", "132.White_crowned_Sparrow")


def some_sparrows(folder: Path, train: int = 3, test: int = 9) -> Path:
    """Copy the given numbers of photographs of each of six species."""
    for split, count in {"train": train, "test": test}.items():
        for name in CLASSES:
            (folder / split / name).mkdir(parents=True)
            for file in sorted((SPARROWS / split / name).iterdir())[:count]:
                shutil.copy(file, folder / split / name)
    return folder


def draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the figures of evaluation and retrieval empty, because drawing takes most of the time."""
    figures = "covpool.evaluate.figures."
    monkeypatch.setattr(f"{figures}chosen_queries", lambda scores: [])
    for name in ("draw_classes", "draw_confusion", "draw_neighbours", "draw_reliability"):
        monkeypatch.setattr(figures + name, lambda *_: None)
    monkeypatch.setattr(f"{figures}png", lambda figure, **_: b"")


def a_bundle(folder: Path, classes: tuple[str, ...] = CLASSES) -> Path:
    """Save a small network with random weights, whose classifier is scaled up for confident predictions."""
    torch.manual_seed(0)
    model = create_model("test_resnet", dim=8, num_classes=len(classes), image_size=64)
    with torch.no_grad():
        model.head.classifier.weight.mul_(60)  # type: ignore[operator, union-attr]
    return save_model(model, folder, classes=classes)
