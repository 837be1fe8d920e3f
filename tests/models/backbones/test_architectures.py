"""Every timm family through all steps of a model: shapes, gradients, a new classifier, a bundle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import covpool
from covpool.models import PooledClassifier
from tests.models.backbones.architectures import ARCHITECTURES, FAMILIES, Architecture

ALEXNET = Architecture("alexnet", 256, size=127, stride=19)
# timm's own test networks, which are fast.
SMALL = [
    Architecture("test_efficientnet", 64, fast=True),
    Architecture("test_convnext", 64, stride=32, kept=False, fast=True),
    Architecture("test_vit", 64, kept=False, prefix_tokens=1, fast=True),
]

parametrized = pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(a, id=a.name, marks=() if a.fast else pytest.mark.slow)
        for a in (*ARCHITECTURES, ALEXNET, *SMALL)
    ],
)


def make(architecture: Architecture) -> tuple[PooledClassifier, Tensor]:
    model = covpool.create_model(
        architecture.name, dim=16, num_classes=5, image_size=architecture.size, drop_rate=0.1
    )
    return model, torch.randn(2, 3, architecture.size, architecture.size)


def test_enough_of_them() -> None:
    assert len(ARCHITECTURES) >= 30
    assert len(FAMILIES) >= 12


@parametrized
def test_architecture(architecture: Architecture, tmp_path: Path) -> None:
    model, images = make(architecture)
    check_features(architecture, model, images)
    check_gradients(model, images)
    check_new_classifier(model, images)
    check_bundle(model, images, tmp_path / "bundle")


def check_features(architecture: Architecture, model: PooledClassifier, images: Tensor) -> None:
    assert model.config.keep_resolution is architecture.kept
    assert model.num_features == architecture.channels
    with torch.no_grad():
        features = model.eval().forward_features(images)
    side, channels = architecture.side, architecture.channels
    if architecture.prefix_tokens is not None:
        assert features.shape == (2, architecture.prefix_tokens + side * side, channels)
        assert model.format.positions(features).shape == (2, side * side, channels)
    elif model.format.layout == "channels_last":
        assert features.shape == (2, side, side, channels)
    else:
        assert features.shape == (2, channels, side, side)


def check_gradients(model: PooledClassifier, images: Tensor) -> None:
    logits = model.train()(images)
    assert logits.shape == (2, 5)
    torch.nn.functional.cross_entropy(logits, torch.tensor([0, 4])).backward()
    assert logits.isfinite().all()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # DistributedDataParallel waits for the gradient of every parameter.
            assert parameter.grad is not None, f"{name} has no part in the result"
            assert parameter.grad.isfinite().all(), name


def check_new_classifier(model: PooledClassifier, images: Tensor) -> None:
    before = model.pool.reduction.projection.weight.clone() if model.pool.reduction else None
    model.eval().reset_classifier(7)
    with torch.no_grad():
        assert model(images).shape == (2, 7)
        vector = model.forward_head(model.forward_features(images), pre_logits=True)
    assert vector.shape == (2, model.head_hidden_size) == (2, 136)
    if before is not None:
        assert torch.equal(model.pool.reduction.projection.weight, before)


def check_bundle(model: PooledClassifier, images: Tensor, folder: Path) -> None:
    covpool.save_model(model, folder)
    loaded = covpool.load_model(folder)
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with torch.no_grad():
        assert torch.equal(loaded(images), model.eval()(images))
