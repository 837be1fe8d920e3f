"""Cards by an attacker: their hashes are correct, but their content is refused."""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from covpool.errors import BundleError
from covpool.models import card as card_module
from covpool.models import tensors as tensors_module
from covpool.models.bundle import load_model
from covpool.models.saving import save_model
from tests.models.bundles.samples import (
    CLASSES,
    assert_not_loaded,
    assert_refused,
    edit_card,
    edit_weights,
    limited,
    put_weights,
    trained,
)


def set_config(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda fields: fields["config"].update(values)


def set_preprocessing(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda fields: fields["preprocessing"].update(values)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda f: f["classes"].append("fourth"), "it must name 3 classes; got 4"),
        (lambda f: f.update(classes=[1, 2, 3]), r"it must name 3 classes; got 3: \[1, 2, 3\]"),
        (lambda f: f.pop("metrics"), "covpool.json has no field 'metrics'"),
        (lambda f: f.update(metrics=[]), "'metrics' of covpool.json"),
        (lambda f: f.update(versions="2"), "'versions' of covpool.json"),
        (lambda f: f["weights"].update(bytes=-1), "belongs to another card"),
        (lambda f: f["weights"].update(bytes=1.5), "'bytes' of weights has a wrong type; got 1.5"),
        (lambda f: f["weights"].update(buffer_dtypes=["x"]), "'buffer_dtypes' of weights"),
        (lambda f: f["preprocessing"].update(input_size=[3, 10**9, 10**9]), "preprocessing has 1000000000"),
        (lambda f: f["preprocessing"].pop("std"), "preprocessing has no field 'std'"),
        (set_preprocessing(input_size=[3, 60_000, 60_000]), "but crop_pct must be in"),
        (set_preprocessing(input_size=[5000, 8, 8]), "is not channels, height and width"),
        (set_preprocessing(input_size=[3, 224]), "is not channels, height and width"),
        (set_preprocessing(input_size=[3, 224, 0]), "is not channels, height and width"),
        (set_preprocessing(input_size=[3, 224.0, True]), "is not channels, height and width"),
        (set_preprocessing(input_size="abc"), "'input_size' of preprocessing has a wrong type"),
        (set_preprocessing(crop_pct=0.001), "but crop_pct must be in"),
        (set_preprocessing(crop_pct=-1), "but crop_pct must be in"),
        (set_preprocessing(crop_pct=1.5), "but crop_pct must be in"),
        (set_preprocessing(std=[1e-300] * 3), "its std .* has values outside 0.001 to 1000"),
        (set_preprocessing(std=[0.0] * 3), "its std .* has values outside"),
        (set_preprocessing(std=["1"] * 3), "its std .* has values outside"),
        (set_preprocessing(mean=[-6e4] * 3), "its mean .* has values outside"),
        (
            lambda f: f["preprocessing"].update(interpolation="/etc/passwd"),
            "'/etc/passwd', which is not",
        ),
        (lambda f: f["config"].pop("backbone"), "config has no field 'backbone'"),
        (set_config(num_classes="3"), "its config is refused: num_classes must be an int; got str"),
        (set_config(num_classes=True), "its config is refused: num_classes must be an int; got bool"),
        (set_config(hidden="abc"), "its config is refused: every width of hidden must be an int"),
        (set_config(pool="rm -rf"), "its config is refused: pool must be one of"),
        (set_config(head="svm"), "its config is refused: head must be one of"),
        (set_config(quantum=True), "its config is refused: a model has no quantum"),
        (set_config(image_size=10**9), "image_size has 1000000000, but the largest value allowed"),
        (set_config(pool_options={"steps": 10**9}), "pool_options has 1000000000"),
        (set_config(backbone_options={"depth": 10**9}), "backbone_options has 1000000000"),
        (set_config(backbone_options={"depths": [1, [2, 10**9]]}), "backbone_options has 1000000000"),
        (set_config(backbone_options={"act_layer": "os:system"}), "backbone_options has 'os:system'"),
    ],
)
def test_cards_that_make_no_sense_are_refused(
    edit: Callable[[dict[str, Any]], object], reason: str, bundle: Path
) -> None:
    edit_card(bundle, edit)
    assert_refused(bundle, reason)


@pytest.fixture
def _nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("it should have been refused by now")

    monkeypatch.setattr(tensors_module, "build_model", refuse)


@pytest.mark.usefixtures("_nothing_is_built")
@pytest.mark.parametrize(
    "backbone",
    [
        "hf-hub:stranger/model",
        "hf_hub:stranger/model",
        "local-dir:/tmp/model",
        "stranger/resnet18",
        "../resnet18",
        "https://example.com/resnet18",
        "resnet18.hf-hub:stranger/model",
        "resnet18\n",
        "",
    ],
)
def test_backbones_are_plain_names(backbone: str, bundle: Path) -> None:
    edit_card(bundle, set_config(backbone=backbone))
    assert_refused(bundle, "is not the plain name of a timm network")


@pytest.mark.usefixtures("_nothing_is_built")
@pytest.mark.parametrize(
    "option",
    [
        "pretrained",
        "pretrained_cfg",
        "pretrained_cfg_overlay",
        "pretrained_strict",
        "pretrained_filter_fn",
        "checkpoint_path",
        "cache_dir",
        "model_cfg",
        "feature_cfg",
        "features_only",
        "feature_cls",
        "kwargs_filter",
        "__class__",
        "a b",
    ],
)
def test_options_that_read_or_fetch_are_refused(option: str, bundle: Path) -> None:
    edit_card(bundle, set_config(backbone_options={option: True}))
    assert_refused(bundle, f"its backbone_options have '{option}', which a bundle must not set")


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd"])
def test_the_file_that_a_card_names_is_not_read(name: str, bundle: Path) -> None:
    edit_card(bundle, lambda fields: fields["weights"].update(file=name))
    assert load_model(bundle).classes == CLASSES
    (bundle / "model.safetensors").unlink()
    assert_refused(bundle, r"there is no model\.safetensors in it")


def test_every_name_of_timm_is_plain() -> None:
    names = [*timm.list_models(), *timm.list_pretrained()]
    assert len(names) > 1000
    assert not [name for name in names if not re.fullmatch(card_module.PLAIN_NAME, name)]


def test_unknown_backbone_is_refused_with_the_versions(bundle: Path) -> None:
    def edit(fields: dict[str, Any]) -> None:
        fields["config"]["backbone"] = "resnet_of_tomorrow"
        fields["versions"]["timm"] = "9.9.9\x1b"

    edit_card(bundle, edit)
    assert_not_loaded(
        bundle, r"timm has no backbone 'resnet_of_tomorrow'.*saved with .*timm 9\.9\.9\?.*here are"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the memory in use")
@pytest.mark.parametrize(
    "config",
    [
        {"dim": 10**9},
        {"dim": 100_000},
        {"dim": 10**30},
        {"rank": 10**12},
        {"num_classes": 10**11},
        {"head": "mlp", "hidden": [10**6, 10**6]},
        {"dim": -1},
        {"dim": 0},
        {"dim": 8.0},
    ],
)
def test_enormous_networks_are_refused_without_being_built(config: dict[str, Any], bundle: Path) -> None:
    load_model(bundle)  # imports on first use also take memory

    def edit(fields: dict[str, Any]) -> None:
        fields["classes"] = None
        fields["config"].update(config)

    edit_card(bundle, edit)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    start = time.process_time()
    with limited(resource.RLIMIT_AS, used + 2**28):
        assert_not_loaded(bundle, "in the network of its card|cannot be built: (?!.*(allocate|memory))")
    assert time.process_time() - start < 10


def test_endless_networks_are_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors_module, "MAX_CALLS", 5000)
    load_model(bundle)
    edit_card(bundle, set_config(head="mlp", hidden=[1] * 10**5))
    start = time.process_time()
    assert_not_loaded(bundle, "more layers than any network of timm")
    assert time.process_time() - start < 5


def test_computed_buffers_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"backbone_options": {"depth": 1}, "image_size": 56}
    folder = save_model(trained(backbone="eva02_tiny_patch14_224", **options), tmp_path / "model")
    monkeypatch.setattr(tensors_module, "MAX_COMPUTED_BYTES", 1000)
    assert_not_loaded(folder, "GiB in addition to its weights")


def test_a_huge_hollow_card_is_not_read(bundle: Path) -> None:
    with (bundle / "covpool.json").open("r+b") as file:
        file.truncate(2**40)
    assert_refused(bundle, "covpool.json is larger than 16 MiB")


def test_long_values_are_shortened_in_messages(bundle: Path) -> None:
    edit_card(bundle, lambda fields: fields["config"].update(backbone="/" + "x" * 100_000))
    assert_refused(bundle, r"its backbone '/x+\.\.\.x+' is not the plain name of a timm network")


def test_huge_hollow_weights_are_not_read(bundle: Path) -> None:
    with (bundle / "model.safetensors").open("r+b") as file:
        file.truncate(2**38)
    edit_card(bundle, lambda fields: fields["weights"].update(bytes=2**38))
    with pytest.raises(BundleError, match="far larger than the network"):
        load_model(bundle)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda t: t.update(extra=torch.zeros(1)), "'extra' is float .* missing in the network"),
        (
            lambda t: t.pop("head.classifier.bias"),
            "'head.classifier.bias' is missing in its weights",
        ),
        (lambda t: t.update(renamed=t.pop("head.classifier.bias")), "is missing in its weights"),
        (
            lambda t: t.update({"head.classifier.bias": torch.zeros(4)}),
            r"is float \(4,\) in its weights, float \(3,\) in",
        ),
        (
            lambda t: t.update({"head.classifier.bias": torch.zeros(3, dtype=torch.int32)}),
            "is int32 .* in its",
        ),
        (
            lambda t: t.update({"head.classifier.bias": torch.zeros(3, dtype=torch.complex64)}),
            "is complex64",
        ),
    ],
)
def test_weights_of_another_network_are_refused(
    edit: Callable[[dict[str, torch.Tensor]], object], reason: str, bundle: Path
) -> None:
    edit_weights(bundle, edit)
    assert_not_loaded(bundle, reason)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(bundle: Path, tmp_path: Path, value: float) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["head.classifier.weight"][1, 2] = value

    edit_weights(bundle, spoil)
    assert_not_loaded(bundle, r"'head.classifier.weight' .* has NaN or infinite values: 1 of \d+")
    model = trained()
    spoil(model.state_dict())
    with pytest.raises(BundleError, match="has NaN or infinite values"):
        save_model(model, tmp_path / "own")


def test_counter_cannot_become_a_fraction(tmp_path: Path) -> None:
    folder = save_model(trained(backbone="test_resnet"), tmp_path / "model")
    edit_weights(
        folder, lambda tensors: tensors.update({"backbone.bn1.num_batches_tracked": torch.tensor(1.0)})
    )
    assert_not_loaded(folder, "is float .* in its weights, int64 .* in the network")


def test_header_that_points_outside_its_data_is_refused(bundle: Path) -> None:
    data = (bundle / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["head.classifier.bias"]["data_offsets"] = [0, 12]
    text = json.dumps(header).encode()
    put_weights(bundle, len(text).to_bytes(8, "little") + text + data[8 + length :])
    assert_not_loaded(bundle, "not a safetensors file")
