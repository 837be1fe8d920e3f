"""The paper's networks by name: their size, their maps, and their logits against an oracle."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from covpool.models import PooledClassifier  # registers the networks with timm
from tests.functional.tolerances import assert_close
from tests.models.weights.paper_networks import (
    alexnet_logits,
    randomize_batchnorm,
    renamed,
    resnet_logits,
    vgg_logits,
)

RESNET_NAMES = {
    "backbone.": "",
    "pool.reduction.projection.": "layer_reduce.",
    "pool.reduction.norm.": "layer_reduce_bn.",
    "head.classifier.": "fc.",
}
VGG_NAMES = {
    "backbone.": "",
    "pool.reduction.projection.": "representation.conv_dr_block.0.",
    "pool.reduction.norm.": "representation.conv_dr_block.1.",
    "head.hidden.0.": "classifier.0.",
    "head.hidden.3.": "classifier.3.",
    "head.classifier.": "classifier.6.",
}
ALEXNET_NAMES = {
    **{f"backbone.features.{n}.": f"conv{i}." for i, n in enumerate((0, 4, 8, 11, 14), start=1)},
    **{f"backbone.features.{n}.": f"bn{i}." for i, n in enumerate((1, 5, 9, 12, 15), start=1)},
    "head.hidden.0.": "fc6.",
    "head.hidden.1.": "bn6.",
    "head.hidden.4.": "fc7.",
    "head.hidden.5.": "bn7.",
    "head.classifier.": "fc8.",
}


def on_meta(name: str) -> PooledClassifier:
    """Return the full network with 1000 classes on the meta device."""
    with torch.device("meta"):
        model = timm.create_model(f"isqrt_cov_{name}")
    assert isinstance(model, PooledClassifier)
    return model.eval()


def small(name: str, **options: Any) -> PooledClassifier:
    """Return a narrow network in double precision, with different values in all BatchNorms."""
    model = timm.create_model(f"isqrt_cov_{name}", num_classes=6, **options)
    with torch.no_grad():
        randomize_batchnorm(model.state_dict())
    return model.double().eval()


@torch.no_grad()
def logits_of(model: PooledClassifier, side: int = 64) -> tuple[Tensor, Tensor]:
    images = torch.randn(2, 3, side, side, dtype=torch.float64)
    return images, model(images)


@pytest.mark.parametrize(
    ("name", "parameters", "maps"),
    [
        ("alexnet", 158_103_464, (256, 13, 13)),
        ("vgg16_bn", 170_479_144, (512, 14, 14)),  # as in the authors' code
        ("resnet50", 56_929_832, (2048, 14, 14)),  # as in the authors' code
        pytest.param("resnet101", 75_921_960, (2048, 14, 14), marks=pytest.mark.slow),
    ],
)
def test_size_and_last_map(name: str, parameters: int, maps: tuple[int, ...]) -> None:
    model = on_meta(name)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model.forward_features(torch.empty(1, 3, 224, 224, device="meta")).shape == (1, *maps)
    assert model.pool.out_features == 256 * 257 // 2
    assert model.config.pool == "isqrt_cov"
    assert model(torch.empty(1, 3, 224, 224, device="meta")).shape == (1, 1000)


def test_resnet50_weight_for_weight() -> None:
    model = small("resnet50", dim=16)
    images, logits = logits_of(model)
    assert_close(logits, resnet_logits(renamed(model.state_dict(), RESNET_NAMES), images))


@pytest.mark.slow
def test_vgg_weight_for_weight() -> None:
    model = small("vgg16_bn", dim=16, hidden=(24, 24))
    images, logits = logits_of(model)
    assert_close(logits, vgg_logits(renamed(model.state_dict(), VGG_NAMES), images))


def test_alexnet_weight_for_weight() -> None:
    model = small("alexnet", hidden=(24, 24))
    images, logits = logits_of(model, side=128)
    assert_close(logits, alexnet_logits(renamed(model.state_dict(), ALEXNET_NAMES), images))


def test_resnet_is_dilated_nowhere() -> None:
    model = on_meta("resnet50")
    assert {m.dilation for m in model.modules() if isinstance(m, nn.Conv2d)} == {(1, 1)}
    assert {m.stride for m in model.backbone.layer4.modules() if isinstance(m, nn.Conv2d)} == {(1, 1)}


def test_alexnet_has_batchnorm_everywhere_and_no_dropout() -> None:
    model = on_meta("alexnet")
    assert model.pool.reduction is None
    assert not any(m.p for m in model.modules() if isinstance(m, nn.Dropout))
    after = [b for a, b in pairwise(model.backbone.features) if isinstance(a, nn.Conv2d)]
    assert [type(m) for m in after] == [nn.BatchNorm2d] * 5
    after = [b for a, b in pairwise(model.head.hidden) if isinstance(a, nn.Linear)]
    assert [type(m) for m in after] == [nn.BatchNorm1d] * 2


def test_vgg_has_dropout_after_each_hidden_layer() -> None:
    model = on_meta("vgg16_bn")
    assert [m.p for m in model.head.modules() if isinstance(m, nn.Dropout)] == [0.5, 0.5]
    assert [(m.in_features, m.out_features) for m in model.head.modules() if isinstance(m, nn.Linear)] == [
        (32896, 4096),
        (4096, 4096),
        (4096, 1000),
    ]


def test_residual_branches_do_not_start_at_zero() -> None:
    # Starting at zero is timm's default, which is newer than the paper.
    model = timm.create_model("isqrt_cov_resnet50", num_classes=2, dim=8)
    assert all(block.bn3.weight.eq(1).all() for block in model.backbone.layer4)
