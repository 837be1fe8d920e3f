"""A bundle restores the model bit by bit. Saving replaces a bundle completely or leaves the old one."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import covpool
from covpool.errors import BundleError
from covpool.functional.newton_schulz import FITTED_STEPS
from covpool.models import PooledClassifier
from covpool.models.bundle import load_model, read_card
from covpool.models.card import plain_json
from covpool.models.saving import check_savable, save_model
from tests.models.bundles.samples import (
    CLASSES,
    TINY,
    assert_same,
    bits,
    edit_card,
    images,
    limited,
    trained,
)

ROOT = Path(__file__).parents[3]


def slow(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


RESNET = {"dim": 16, "image_size": 64}
LOW_RANK = {"dim": 16, "join": "cls", "rank": 4}
# Its rotary embedding is a computed buffer. It is not saved, but is cast with the rest.
ROTARY = {"backbone_options": {"depth": 1}, "image_size": 56}
MLP = {"head": "mlp", "hidden": (8,), "hidden_batchnorm": True, "image_size": 96}


@pytest.mark.parametrize(
    ("backbone", "options", "dtype"),
    [
        ("test_vit", LOW_RANK, torch.float32),
        ("eva02_tiny_patch14_224", ROTARY, torch.bfloat16),
        ("test_byobnet", {"pool": "gap", "num_classes": 0}, torch.float32),
        slow("resnet10t", RESNET, torch.float32),
        slow("resnet10t", RESNET, torch.bfloat16),
        slow("test_vit", LOW_RANK, torch.bfloat16),
        slow("test_vit", {"dim": 16, "join": "cls", "normalize": "l2"}, torch.float32),
        slow("eva02_tiny_patch14_224", ROTARY, torch.float32),
        slow("test_byobnet", {"pool": "gap", "num_classes": 0}, torch.bfloat16),
        slow("alexnet", MLP, torch.float32),
        slow("alexnet", MLP, torch.bfloat16),
        slow(
            "test_efficientnet",
            {"pool_options": {"steps": 3, "compute_dtype": torch.bfloat16, "iteration": "fitted"}},
            torch.float32,
        ),
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
    assert loaded.config.to_dict() == plain_json("config", model.config.to_dict())


def test_each_tensor_keeps_its_own_dtype(tmp_path: Path) -> None:
    model = trained()
    model.backbone.bfloat16()
    model.head.double()
    assert_same(load_model(save_model(model, tmp_path / "model")), model)


def test_bits_that_are_no_ordinary_numbers_survive(tmp_path: Path) -> None:
    model = trained()
    weight = model.head.classifier.weight.data
    weight.view(-1)[:3] = torch.tensor([-0.0, 1e-45, 3e38])
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


def test_a_bundle_names_its_iteration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of the default does not affect a saved bundle."""
    model = trained(**TINY)
    x = images(model)
    save_model(model, tmp_path)
    fields = json.loads((tmp_path / "covpool.json").read_text("utf-8"))
    assert fields["config"]["pool_options"] == {"iteration": "fitted", "steps": FITTED_STEPS}
    monkeypatch.setattr("covpool.functional.newton_schulz.FITTED_STEPS", 7 - FITTED_STEPS)
    with torch.no_grad():
        assert torch.equal(bits(load_model(tmp_path)(x)), bits(model(x)))


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


# Saving.


def test_options_that_fill_no_memory_may_be_large(tmp_path: Path) -> None:
    options = {"features": 20_000, "seed": 20_240_501}
    model = covpool.create_model("test_resnet", pool="cbp", dim=8, num_classes=3, pool_options=options)
    check_savable(model)
    assert load_model(save_model(model, tmp_path / "cbp")).config == model.config


def test_what_cannot_be_saved_is_known_before() -> None:
    options = {"features": 10**6}
    model = covpool.create_model("test_resnet", pool="cbp", dim=8, num_classes=0, pool_options=options)
    with pytest.raises(BundleError, match="pool_options has 1000000, but the largest value allowed is 65536"):
        check_savable(model)


def test_bundle_is_replaced(bundle: Path, other: PooledClassifier) -> None:
    save_model(other, bundle)
    loaded = load_model(bundle)
    assert_same(loaded, other)
    assert loaded.classes is None
    assert [path.name for path in bundle.parent.iterdir()] == ["birds"]


def test_empty_folder_and_folder_that_is_a_link_are_filled(model: PooledClassifier, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    save_model(model, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert read_card(tmp_path / "real").config == model.config


@pytest.mark.parametrize("name", ["README.md", "model.safetensors", ".git"])
def test_folder_of_something_else_is_left_alone(name: str, model: PooledClassifier, tmp_path: Path) -> None:
    (tmp_path / name).write_text("precious")
    with pytest.raises(BundleError, match="save to a new or empty folder"):
        save_model(model, tmp_path)
    assert (tmp_path / name).read_text() == "precious"


def test_bundle_with_something_else_beside_it_is_left_alone(bundle: Path, other: PooledClassifier) -> None:
    (bundle / "notes.txt").write_text("precious")
    with pytest.raises(BundleError, match=r"such as 'notes\.txt'"):
        save_model(other, bundle)
    assert read_card(bundle).classes == CLASSES


def test_file_is_left_alone(model: PooledClassifier, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(BundleError, match="a file of this name exists"):
        save_model(model, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"classes": ["a", "b"]}, BundleError, "it must name 3 classes; got 2"),
        ({"classes": "abc"}, TypeError, "classes must be a list of strings"),
        ({"classes": [0, 1, 2]}, TypeError, "classes must be a list of strings"),
        (
            {"classes": ["a", "b", "\udcff"]},
            ValueError,
            r"classes\[2\] is '\\udcff', which is not valid",
        ),
        (
            {"metrics": {"top1": torch.tensor(0.5)}},
            TypeError,
            r"metrics\['top1'\] .* got Tensor: pass its .tolist\(\)",
        ),
        (
            {"recipe": {"stages": [{"f": print}]}},
            TypeError,
            r"recipe\['stages'\]\[0\]\['f'\] must be numbers",
        ),
        ({"recipe": {3: "x"}}, TypeError, "recipe must have strings as keys; got 3"),
    ],
)
def test_mistakes_in_saving_cost_nothing(
    arguments: dict[str, Any], error: type[Exception], message: str, bundle: Path, other: PooledClassifier
) -> None:
    with pytest.raises(error, match=message):
        save_model(other, bundle, **arguments)
    assert read_card(bundle).classes == CLASSES


def test_metric_that_is_no_number_does_not_cost_the_model(model: PooledClassifier, tmp_path: Path) -> None:
    save_model(model, tmp_path / "model", metrics={"loss": float("nan"), "worst": (float("inf"), 1)})
    assert read_card(tmp_path / "model").metrics == {"loss": None, "worst": [None, 1]}


def test_model_that_its_config_does_not_describe_is_not_saved(bundle: Path) -> None:
    model = trained()
    model.head.classifier = nn.Linear(model.head.classifier.in_features, 4)
    with pytest.raises(
        BundleError,
        match=r"changed after it was created.*'head.classifier.bias' is float \(4,\) in its",
    ):
        save_model(model, bundle)
    model.head.classifier = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(
        BundleError,
        match=r"changed after it was created.*'head.classifier.0.bias' is .* missing in the",
    ):
        save_model(model, bundle)
    assert read_card(bundle).classes == CLASSES


def test_wrapped_and_foreign_models_are_not_saved(model: PooledClassifier, tmp_path: Path) -> None:
    for wrong in (nn.Linear(2, 2), nn.DataParallel(model)):
        with pytest.raises(TypeError, match=r"pass the wrapped model itself"):
            save_model(wrong, tmp_path / "model")
    with torch.device("meta"), pytest.raises(BundleError, match="not an ordinary tensor"):
        save_model(covpool.models.create_model("test_resnet", dim=8), tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_full_disk_leaves_the_old_bundle(bundle: Path, other: PooledClassifier) -> None:
    size = (bundle / "model.safetensors").stat().st_size
    for limit in (0, size // 2, size - 1):
        with limited(resource.RLIMIT_FSIZE, limit), pytest.raises(OSError, match="File too large"):
            save_model(other, bundle)
        assert [path.name for path in bundle.parent.iterdir()] == ["birds"]
        assert read_card(bundle).classes == CLASSES
    load_model(bundle)


@pytest.mark.slow
def test_a_kill_while_saving_leaves_a_bundle(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.models.bundles.overwriting", str(tmp_path), "30"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["kills"] == 30
    assert report["seen"] > 5, "the kills came before anything was saved"
    assert report["left behind"], "no kill came in the middle of saving"
