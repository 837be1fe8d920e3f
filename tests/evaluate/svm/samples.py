"""Made-up features of length one with overlapping classes, and real images in folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from covpool.evaluate.svm.solvers import Problem
from covpool.models import create_model
from covpool.models.saving import save_model
from tests.data.pictures import SPARROWS


@dataclass(frozen=True, eq=False)
class Matrix:
    x: NDArray[np.float32]

    @property
    def columns(self) -> int:
        return self.x.shape[1]

    def read(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        return self.x[numbers]


def features(
    classes: int, each: int, columns: int, seed: int = 0, spread: float = 1.0
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return features like pooled vectors, with a large common part and a decaying spectrum.

    The classes are the same for all seeds; the samples are not.
    """
    world, random = np.random.default_rng(99), np.random.default_rng(seed)
    fall = 1 / np.sqrt(1 + np.arange(columns, dtype=np.float32))
    shared = 4 * world.standard_normal(columns, dtype=np.float32) * fall
    centers = world.standard_normal((classes, columns), dtype=np.float32) * fall
    labels = np.repeat(np.arange(classes), each)
    x = spread * random.standard_normal((len(labels), columns), dtype=np.float32) * fall
    x += shared + centers[labels]
    return x / np.linalg.norm(x, axis=1, keepdims=True), labels


def a_problem(classes: int, each: int, columns: int, **options: Any) -> Problem:
    x, labels = features(classes, each, columns, **options)
    return Problem(Matrix(x), np.arange(len(x)), labels, classes)


def some_sparrows(root: Path, classes: int = 3, each: int = 6) -> Path:
    """Create links to the first images of the first species."""
    for split in ("train", "test"):
        for species in sorted((SPARROWS / split).iterdir())[:classes]:
            folder = root / split / species.name
            folder.mkdir(parents=True)
            for picture in sorted(species.iterdir())[:each]:
                (folder / picture.name).symlink_to(picture)
    return root


def a_bundle(folder: Path, classes: int = 3, **options: Any) -> Path:
    torch.manual_seed(0)
    settings = {"dim": 8, "num_classes": classes, "image_size": 64, **options}
    model = create_model("test_resnet", **settings)
    names = [species.name for species in sorted((SPARROWS / "train").iterdir())[:classes]]
    return save_model(model, folder, classes=names if settings["num_classes"] else None)
