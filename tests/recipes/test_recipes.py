"""The bundled recipes: the paper's numbers, typed here again, and their networks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from covpool import create_model, save_model
from covpool.data.transforms import Preprocessing, training_transform
from covpool.models.create import build_model
from covpool.training.recipe import Recipe
from covpool.training.recipe_files import CLASSIFIER, read_recipe, recipe_names

# Section 4.2 of the paper.
ALEXNET = {
    "batch": 128,
    "epochs": 20,
    "lr": 10**-1.1,
    "momentum": 0.9,
    "decay": 0.0005,
    "kind": "exponential",
    "final_lr": 10**-5,
    "sides": 256,
    "size": 224,
    "test_side": 256,
    "colour": "lighting",
    "factor": 1,
}
# Section 4.3.
RESNET = {
    **ALEXNET,
    "batch": 256,
    "epochs": 60,
    "decay": 0.0001,
    "kind": "steps",
    "milestones": (30, 45),
    "sides": (256, 512),
}
del RESNET["final_lr"]
# Section 4.4, which does not state the batch size, the weight decay and the schedule.
FINE = {"epochs": 100, "lr": 10**-2.1, "momentum": 0.9, "size": 448, "colour": "none", "factor": 5}

# Parameter counts of the public PyTorch code. For ResNet-101: torchvision's, with our head.
R50, VGG = 56_929_832, 170_479_144
R101 = 44_549_160 - (2048 * 1000 + 1000) + (2048 * 256 + 2 * 256) + (32_896 * 1000 + 1000)


def narrower(dim: int, classes: int = 1000) -> int:
    """Return the parameter count of ResNet-50 with another width."""
    features = dim * (dim + 1) // 2
    return 25_557_032 - 2_049_000 + (2048 * dim + 2 * dim) + (features + 1) * classes


PAPER: dict[str, tuple[dict[str, Any], str, int | None, int | None]] = {
    "alexnet-imagenet": (ALEXNET, "alexnet", None, None),
    "alexnet-imagenet-frobenius": (ALEXNET, "alexnet", None, None),
    "resnet50-imagenet": (RESNET, "resnet50", 256, R50),
    "resnet50-imagenet-90": ({**RESNET, "epochs": 90, "milestones": (30, 60)}, "resnet50", 256, R50),
    "resnet50-imagenet-d64": (RESNET, "resnet50", 64, narrower(64)),
    "resnet50-imagenet-d128": (RESNET, "resnet50", 128, narrower(128)),
    "resnet50-imagenet-batchnorm": (RESNET, "resnet50", 256, R50 + 2 * 32_896),
    "resnet50-imagenet-uncompensated": (RESNET, "resnet50", 256, R50),
    "resnet101-imagenet": (RESNET, "resnet101", 256, R101),
    "vgg-d-imagenet": (RESNET, "vgg16_bn", 256, VGG),
    **{
        f"{network}-{images}{suffix}": (FINE, backbone, dim, parameters)
        for network, suffix, backbone, dim, parameters in (
            ("resnet50", "", "resnet50", 256, R50),
            ("resnet50", "-d128", "resnet50", 128, narrower(128)),
            ("resnet101", "", "resnet101", 256, R101),
            ("vgg-d", "", "vgg16_bn", 256, VGG),
        )
        for images in ("birds", "aircraft", "cars")
    },
}


def found(recipe: Recipe) -> dict[str, Any]:
    """Return the values of a recipe under the names of the tables above."""
    crop_pct = recipe.model.preprocessing["crop_pct"]
    assert recipe.model.image_size is not None
    return {
        "batch": recipe.batch_size,
        "epochs": recipe.schedule.epochs,
        "lr": recipe.optimizer.lr,
        "momentum": recipe.optimizer.momentum,
        "decay": recipe.optimizer.weight_decay,
        "kind": recipe.schedule.kind,
        "milestones": recipe.schedule.milestones,
        "final_lr": recipe.schedule.final_lr,
        "sides": recipe.augmentation.shorter_side,
        "size": recipe.model.image_size,
        "test_side": math.floor(recipe.model.image_size / crop_pct),
        "colour": recipe.augmentation.colour,
        "factor": recipe.optimizer.classifier_factor,
    }


def test_every_recipe_but_two_is_the_papers() -> None:
    assert recipe_names().keys() == PAPER.keys() | {"finetune", "modern"}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_numbers(name: str) -> None:
    expected, backbone, dim, _ = PAPER[name]
    recipe = read_recipe(name)
    values = found(recipe)
    for key in ("lr", "final_lr"):
        assert values.pop(key) == pytest.approx(expected.get(key, Recipe().schedule.final_lr), rel=1e-15)
    assert {key: values[key] for key in values.keys() & expected.keys()} == {
        key: expected[key] for key in expected.keys() - {"lr", "final_lr"}
    }
    assert (recipe.model.backbone, recipe.model.dim, recipe.model.pool) == (backbone, dim, "isqrt_cov")
    options = recipe.model.pool_options
    assert (options["iteration"], options["steps"]) == ("paper", 5)
    assert (recipe.optimizer.name, recipe.optimizer.decay_norms) == ("sgd", True)
    assert recipe.augmentation.flip == 0.5
    assert recipe.augmentation.crop == ("test" if expected is FINE else "random")
    assert (recipe.loss.mixup, recipe.loss.label_smoothing, recipe.loop.ema) == (0, 0, None)
    assert recipe.out == name


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("alexnet-imagenet", "normalization", "trace"),
        ("alexnet-imagenet-frobenius", "normalization", "frobenius"),
        ("resnet50-imagenet-batchnorm", "compensation", "batchnorm"),
        ("resnet50-imagenet-uncompensated", "compensation", "none"),
    ],
)
def test_ablations(name: str, option: str, value: str) -> None:
    assert read_recipe(name).model.pool_options[option] == value


@pytest.mark.parametrize("name", [name for name in PAPER if "imagenet" not in name])
def test_fine_tuning_begins_where_a_recipe_for_imagenet_ends(name: str) -> None:
    fine = read_recipe(name)
    folder, _, bundle = (fine.weights.bundle or "").partition("/")
    source = read_recipe(folder)
    assert (source.out, bundle) == (folder, "bundle")
    for key in ("backbone", "dim", "pool", "pool_options", "head", "hidden", "hidden_batchnorm"):
        assert getattr(fine.model, key) == getattr(source.model, key)
    assert fine.validation.refit


FINE_TUNED = ("resnet50-birds", "resnet50-aircraft", "resnet50-cars-d128")  # the others are as on ImageNet


FAST = ("alexnet-imagenet", "resnet50-imagenet", "vgg-d-imagenet", "resnet50-cars-d128", "modern", "finetune")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
        for name in [*(name for name in PAPER if "imagenet" in name), *FINE_TUNED, "modern", "finetune"]
    ],
)
def test_networks_can_be_made(name: str) -> None:
    recipe = read_recipe(name)
    with torch.device("meta"):
        model = build_model(recipe.model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    _, _, _, expected = PAPER.get(name, (None, None, None, None if name == "finetune" else R50))
    if expected is not None:
        assert parameters == expected
    assert model.config.keep_resolution == (name != "finetune")
    preprocessing = Preprocessing.of(model.pretrained_cfg)
    assert preprocessing.size == (recipe.model.image_size or 224)
    training_transform(preprocessing, recipe.augmentation)


@pytest.mark.parametrize("weights", [{"weights.pretrained": True}, {"weights.path": "b.pth"}])
@pytest.mark.parametrize("size", [1, 4])
def test_pretrained_weights_are_fine_tuned_in_two_stages(weights: dict[str, Any], size: int) -> None:
    recipe = read_recipe(None, {**weights, "schedule.epochs": size})
    assert recipe == read_recipe("finetune", {**weights, "schedule.epochs": size})
    assert recipe.schedule.head_epochs == {1: 0, 4: 2}[size]
    assert recipe.schedule.head_lr is not None
    assert recipe.schedule.head_lr > recipe.optimizer.lr


def test_a_bundle_brings_its_network(tmp_path: Path) -> None:
    own = {"mean": [0.1, 0.2, 0.3]}
    model = create_model("test_resnet", dim=8, num_classes=3, pool="cov", image_size=64, preprocessing=own)
    bundle = {"weights.bundle": str(save_model(model, tmp_path / "bundle"))}
    recipe = read_recipe(None, bundle)
    assert recipe.schedule.head_first  # as for any other weights
    kept, wanted = vars(recipe.model), vars(model.config)
    assert all(kept[name] == wanted[name] for name in wanted.keys() - CLASSIFIER)
    assert len(wanted.keys() - CLASSIFIER) == 13
    assert read_recipe(None, {**bundle, "model.dim": 16}).model.dim == 16
    assert read_recipe("finetune", bundle).model.dim == 128  # a named recipe overrides the bundle


@pytest.mark.parametrize("size", [1, 3])
def test_the_modern_one_takes_few_epochs(size: int) -> None:
    recipe = read_recipe(None, {"schedule.epochs": size})
    assert recipe == read_recipe("modern", {"schedule.epochs": size})
    assert recipe.optimizer.name == "adamw"
    assert not recipe.optimizer.decay_norms
    assert recipe.schedule.kind == "cosine"
    assert recipe.loop.ema
    assert recipe.loss.mixup
    assert recipe.loss.label_smoothing
    assert recipe.validation.patience


def test_each_says_in_a_sentence_what_it_is() -> None:
    for name, sentence in recipe_names().items():
        assert sentence[0].isupper(), name
        assert sentence.endswith("."), name
        assert not sentence.startswith("#")
    assert len(set(recipe_names().values())) == len(recipe_names())
