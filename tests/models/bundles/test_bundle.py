"""A bundle gives back the model to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from covpool.models import PooledClassifier
from covpool.models import card as card_module
from covpool.models.bundle import load_model, read_card, save_model
from tests.models.bundles.judging import assert_same
from tests.models.bundles.samples import CLASSES, edit_card, images, trained


def slow(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("backbone", "options"),
    [
        ("resnet10t", {"dim": 16, "image_size": 64}),
        ("test_vit", {"dim": 16, "join": "cls", "rank": 4}),
        ("test_vit", {"dim": 16, "join": "cls", "normalize": "l2"}),
        # Its rotary embedding is a buffer that is computed, not saved, and is cast with the rest.
        ("eva02_tiny_patch14_224", {"backbone_options": {"depth": 1}, "image_size": 56}),
        ("test_byobnet", {"pool": "gap", "num_classes": 0}),
        slow("alexnet", {"head": "mlp", "hidden": (8,), "hidden_batchnorm": True, "image_size": 96}),
        slow("test_efficientnet", {"pool_options": {"steps": 3, "compute_dtype": torch.bfloat16}}),
    ],
)
def test_round_trip_is_exact(
    backbone: str, options: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    model = trained(backbone=backbone, **options).to(dtype)
    loaded = load_model(save_model(model, tmp_path / "model"))
    assert not loaded.training
    assert_same(loaded, model)
    x = images(model)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
    assert loaded.pretrained_cfg == model.pretrained_cfg | timm.data.resolve_model_data_config(model)
    assert loaded.config.to_dict() == card_module.plain_json("config", model.config.to_dict())


def test_each_tensor_keeps_its_own_dtype(tmp_path: Path) -> None:
    model = trained()
    model.backbone.bfloat16()
    model.head.double()
    assert_same(load_model(save_model(model, tmp_path / "model")), model)


def test_bits_that_are_no_ordinary_numbers_survive(tmp_path: Path) -> None:
    model = trained()
    weight = model.head.classifier.weight.data
    weight.view(-1)[:4] = torch.tensor([float("nan"), float("-inf"), -0.0, 1e-45])
    assert_same(load_model(save_model(model, tmp_path / "model")), model)


def test_tensors_that_share_or_stride_memory_are_saved(tmp_path: Path) -> None:
    model = trained(backbone="test_resnet").to(memory_format=torch.channels_last)
    block = model.backbone.layer1[0]
    block.bn1.weight = block.bn2.weight
    assert not model.backbone.conv1[0].weight.is_contiguous()
    loaded = load_model(save_model(model, tmp_path / "model"))
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_a_card_from_before_there_was_normalize(bundle: Path, model: PooledClassifier) -> None:
    edit_card(bundle, lambda fields: fields["config"].pop("normalize"))
    loaded = load_model(bundle)
    assert loaded.config == model.config
    assert_same(loaded, model)


def test_loading_draws_no_random_numbers(saved: Path) -> None:
    state = torch.get_rng_state()
    load_model(saved)
    assert torch.equal(torch.get_rng_state(), state)


def test_loading_ignores_the_callers_defaults(saved: Path) -> None:
    with torch.device("meta"):
        loaded = load_model(saved)
    assert_same(loaded, load_model(saved))


def test_loaded_model_trains(saved: Path) -> None:
    model = load_model(saved).train()
    model(images(model)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_card_tells_what_was_saved(saved: Path, model: PooledClassifier) -> None:
    card = read_card(saved)
    assert card.classes == CLASSES
    assert card.metrics == {"top1": 0.75, "per class": [1.0, 0.5, 0.75]}
    assert card.recipe == {"optimizer": {"name": "sgd", "lr": 0.1}}
    assert card.preprocessing == timm.data.resolve_model_data_config(model)
    assert card.versions.keys() == {"python", "torch", "timm", "covpool"}
    assert (card.config.backbone, card.config.pool, card.config.dim) == ("test_vit", "isqrt_cov", 8)


def test_card_is_for_people_too(saved: Path) -> None:
    assert '"Zaunkönig"' in (saved / "covpool.json").read_text(encoding="utf-8")


def test_a_bundle_is_two_files(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == ["covpool.json", "model.safetensors"]
    assert [path.name for path in saved.parent.iterdir()] == ["birds"]


def test_saving_again_gives_the_same_files(saved: Path, tmp_path: Path) -> None:
    card = read_card(saved)
    again = save_model(load_model(saved), tmp_path / "again", metrics=card.metrics, recipe=card.recipe)
    for name in ("covpool.json", "model.safetensors"):
        assert (again / name).read_bytes() == (saved / name).read_bytes()


def test_preprocessing_of_the_bundle_wins_over_that_of_timm(bundle: Path) -> None:
    edit_card(bundle, lambda fields: fields["preprocessing"].update(crop_pct=0.5, mean=[0.1, 0.2, 0.3]))
    model = load_model(bundle)
    assert model.pretrained_cfg["crop_pct"] == 0.5
    assert timm.data.resolve_model_data_config(model)["mean"] == (0.1, 0.2, 0.3)
