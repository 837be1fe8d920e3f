"""Learning rates and weight decay by part of the model."""

from __future__ import annotations

import pytest
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import nn

import covpool
from covpool.models import PooledClassifier, parameter_groups


def rates(model: PooledClassifier, groups: list[dict[str, object]]) -> dict[str, tuple[float, float]]:
    by_id = {
        id(parameter): (group["lr"], group["weight_decay"])
        for group in groups
        for parameter in group["params"]
    }
    assert len(by_id) == sum(len(group["params"]) for group in groups), "a parameter is in two groups"
    return {name: by_id[id(p)] for name, p in model.named_parameters() if id(p) in by_id}


def vit(**options: object) -> PooledClassifier:
    with torch.device("meta"):
        return covpool.create_model("vit_tiny_patch16_224", dim=8, num_classes=5, **options)


def test_the_papers_factor_is_for_the_classifier() -> None:
    model = vit(join="cls")
    found = rates(model, parameter_groups(model, 0.01, weight_decay=1e-4))
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, (lr, decay) in found.items():
        assert lr == pytest.approx(0.05 if name.startswith(("head.", "first_order.")) else 0.01), name
        assert decay == (0.0 if name.removeprefix("backbone.") in ("pos_embed", "cls_token") else 1e-4), name


def test_norms_and_biases_without_decay() -> None:
    model = vit()
    found = rates(model, parameter_groups(model, 0.01, weight_decay=0.05, decay_norms=False))
    assert found["backbone.blocks.0.norm1.weight"][1] == 0.0
    assert found["head.classifier.bias"][1] == 0.0
    assert found["head.classifier.weight"][1] == 0.05


def test_layer_decay() -> None:
    model = vit()
    found = rates(model, parameter_groups(model, 1.0, layer_decay=0.5, classifier_factor=3.0))
    assert found["head.classifier.weight"][0] == 3.0
    assert found["pool.reduction.projection.weight"][0] == 1.0
    depths = [found[f"backbone.blocks.{i}.attn.qkv.weight"][0] for i in range(12)]
    assert depths == [pytest.approx(0.5 ** (12 - i)) for i in range(12)]
    assert found["backbone.patch_embed.proj.weight"][0] == pytest.approx(0.5**13)
    assert found["backbone.pos_embed"][0] == pytest.approx(0.5**13)


@pytest.mark.parametrize(
    "backbone",
    [
        "resnet10t",
        "alexnet",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("tf_efficientnet_lite0", "swin_tiny_patch4_window7_224", "cait_xxs24_224")
        ),
    ],
)
def test_layer_decay_of_other_families(backbone: str) -> None:
    with torch.device("meta"):
        model = covpool.create_model(backbone, dim=8, num_classes=5)
    found = rates(model, parameter_groups(model, 1.0, layer_decay=0.5, classifier_factor=1.0))
    assert found.keys() == dict(model.named_parameters()).keys()
    first = next(iter(found))
    assert found[first][0] == min(rate for rate, _ in found.values()) < 0.3
    assert all(rate < 1 for name, (rate, _) in found.items() if name.startswith("backbone."))
    assert all(rate == 1 for name, (rate, _) in found.items() if not name.startswith("backbone."))


def test_frozen_parameters_are_left_out() -> None:
    model = vit(freeze="backbone")
    found = rates(model, parameter_groups(model, 0.01))
    assert {name.partition(".")[0] for name in found} == {"pool", "head"}


def test_equal_groups_are_one() -> None:
    assert len(parameter_groups(vit(), 0.01, weight_decay=1e-4)) == 3


def test_ratios_last_under_schedulers() -> None:
    model = covpool.create_model("resnet10t", dim=8, num_classes=5)
    optimizer = torch.optim.SGD(parameter_groups(model, 0.1), momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    optimizer.step()
    schedule.step()
    low, high = (group["lr"] for group in optimizer.param_groups)
    assert low < 0.1
    assert high == pytest.approx(5 * low)
    optimizer = torch.optim.SGD(parameter_groups(model, 0.1), momentum=0.9)
    CosineLRScheduler(optimizer, 10).step(5)
    low, high = (group["lr"] for group in optimizer.param_groups)
    assert low == pytest.approx(0.05)
    assert high == pytest.approx(5 * low)


def test_timms_own_factory_takes_the_model() -> None:
    optimizer = create_optimizer_v2(vit(), "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75)
    assert len({group["lr_scale"] for group in optimizer.param_groups}) == 14


def test_a_backbone_that_does_not_tell_its_layers_apart() -> None:
    model = vit()
    model.backbone = nn.Identity()
    with pytest.raises(ValueError, match=r"^vit_tiny_patch16_224 does not list its layers in order"):
        model.group_matcher()
