"""Models for the tests of models, and images for them."""

from __future__ import annotations

import torch

import covpool
from covpool.models import PooledClassifier

IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def on_meta(backbone: str, **options: object) -> PooledClassifier:
    with torch.device("meta"):
        return covpool.create_model(backbone, **options)


def small(**options: object) -> PooledClassifier:
    return covpool.create_model("resnet10t", **{"dim": 8, "num_classes": 5, **options})
