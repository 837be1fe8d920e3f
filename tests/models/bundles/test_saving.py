"""Saving replaces a bundle whole, leaves other things alone, and takes only what can be loaded."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import covpool
from covpool.errors import BundleError
from covpool.models import PooledClassifier
from covpool.models.bundle import check_savable, load_model, read_card, save_model
from tests.models.bundles.judging import assert_same, limited
from tests.models.bundles.samples import CLASSES, trained

SOURCE = Path(covpool.__file__).parent


def test_options_that_fill_no_memory_may_be_large(tmp_path: Path) -> None:
    options = {"features": 20_000, "seed": 20_240_501}
    model = covpool.create_model("test_resnet", pool="cbp", dim=8, num_classes=3, pool_options=options)
    check_savable(model)
    assert load_model(save_model(model, tmp_path / "cbp")).config == model.config


def test_what_cannot_be_saved_is_known_before() -> None:
    options = {"features": 10**6}
    model = covpool.create_model("test_resnet", pool="cbp", dim=8, num_classes=0, pool_options=options)
    with pytest.raises(BundleError, match="pool_options has 1000000, but nothing in it can be above 65536"):
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
    with pytest.raises(BundleError, match="save to a new or an empty one"):
        save_model(model, tmp_path)
    assert (tmp_path / name).read_text() == "precious"


def test_bundle_with_something_else_beside_it_is_left_alone(bundle: Path, other: PooledClassifier) -> None:
    (bundle / "notes.txt").write_text("precious")
    with pytest.raises(BundleError, match=r"such as 'notes\.txt'"):
        save_model(other, bundle)
    assert read_card(bundle).classes == CLASSES


def test_file_is_left_alone(model: PooledClassifier, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(BundleError, match="there is a file of this name"):
        save_model(model, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"classes": ["a", "b"]}, BundleError, "it names 2 classes, but its model has 3"),
        ({"classes": "abc"}, TypeError, "classes must be a list of strings"),
        ({"classes": [0, 1, 2]}, TypeError, "classes must be a list of strings"),
        ({"classes": ["a", "b", "\udcff"]}, ValueError, r"classes\[2\] is '\\udcff', which is no text"),
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
        BundleError, match=r"changed after it was made.*'head.classifier.(weight|bias)' has shape"
    ):
        save_model(model, bundle)
    model.head.classifier = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(
        BundleError, match=r"changed after it was made.*'head.classifier.bias', which is not among"
    ):
        save_model(model, bundle)
    assert read_card(bundle).classes == CLASSES


def test_wrapped_and_foreign_models_are_not_saved(model: PooledClassifier, tmp_path: Path) -> None:
    for wrong in (nn.Linear(2, 2), nn.DataParallel(model)):
        with pytest.raises(TypeError, match=r"pass the model itself where it is wrapped"):
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
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=SOURCE.parents[1])
    assert result.returncode == 0, result.stdout + result.stderr
    told = json.loads(result.stdout)
    assert told["kills"] == 30
    assert told["seen"] > 5, "the kills came before anything was saved"
    assert told["left behind"], "no kill came in the middle of saving"
