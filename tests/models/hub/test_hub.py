"""Bundles and backbones on the Hub: addresses, downloads, the cache, pushes and the model card."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml
from huggingface_hub import constants
from PIL import Image
from timm.models import save_for_hf

import covpool
from covpool.errors import BundleError, HubError, UsageError
from covpool.hub import HubAddress
from covpool.models import PooledClassifier
from covpool.models.bundle import download, load_model, pinned, read_card
from covpool.models.card import INDEX
from covpool.models.push import MARK, push_to_hub
from covpool.models.saving import save_model
from tests.hub_server import TOKEN, Hub, Repository
from tests.models.bundles.samples import CLASSES, assert_same, trained
from tests.pages import DOCS, needs_pages, python_blocks


def test_a_push_loads_with_the_same_bits(hub: Hub, bundle: Path, model: PooledClassifier) -> None:
    address = covpool.push_to_hub(bundle, "ann/birds")
    commit = hub.repositories["ann/birds"].branches["main"]
    assert address == f"hf-hub:ann/birds@{commit}"
    files = hub.repositories["ann/birds"].commits[commit]
    assert files.keys() == {".gitattributes", "README.md", "covpool.json", "model.safetensors"}
    assert files["model.safetensors"] == (bundle / "model.safetensors").read_bytes()
    assert hub.asked("PUT", "/lfs/") == 1
    for text in (address, "hf-hub:ann/birds", "hf-hub:ann/birds@main"):
        loaded = covpool.load_model(text)
        assert_same(loaded, model)
        assert loaded.classes == CLASSES


def test_a_model_is_pushed_without_a_bundle(hub: Hub, model: PooledClassifier) -> None:
    assert_same(load_model(push_to_hub(model, "ann/birds")), model)
    with pytest.raises(UsageError, match="is on the Hub already"):
        push_to_hub("hf-hub:ann/birds", "ann/others")


@pytest.mark.slow
def test_a_second_push_uploads_new_weights_only(hub: Hub, bundle: Path, tmp_path: Path) -> None:
    first = push_to_hub(bundle, "ann/birds")
    push_to_hub(bundle, "ann/copies")
    assert hub.asked("PUT", "/lfs/") == 1
    torch.manual_seed(1)
    other = trained()
    second = push_to_hub(save_model(other, tmp_path / "other"), "hf-hub:ann/birds")
    assert first != second
    assert_same(load_model("hf-hub:ann/birds"), other)
    assert load_model(first).classes == CLASSES


def test_a_divided_classifier_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = dataclasses.replace(read_card(bundle), file=INDEX)
    monkeypatch.setattr("covpool.models.push.read_card", lambda folder: card)
    with pytest.raises(UsageError, match="has a divided classifier in several files"):
        push_to_hub(bundle, "ann/birds")


def test_a_branch(hub: Hub, bundle: Path) -> None:
    push_to_hub(bundle, "ann/birds@v1")
    with pytest.raises(HubError, match=r"has no covpool.json"):
        load_model("hf-hub:ann/birds")
    assert load_model("hf-hub:ann/birds@v1").classes == CLASSES
    with pytest.raises(HubError, match="there is no revision 'v2'"):
        load_model("hf-hub:ann/birds@v2")


def test_private_repositories(hub: Hub, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    push_to_hub(bundle, "ann/secret", private=True)
    assert hub.repositories["ann/secret"].private
    load_model("hf-hub:ann/secret")
    push_to_hub(bundle, "ann/open")
    with pytest.raises(UsageError, match="exists and is public"):
        push_to_hub(bundle, "ann/open", private=True)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", constants.HF_HUB_CACHE + "-2")
    with pytest.raises(HubError, match="or it is private: check the name, or log in with hf auth login"):
        load_model("hf-hub:ann/secret")


@pytest.mark.parametrize(
    "text",
    ["birds", "hf-hub:birds", "hf-hub:ann/birds@", "hf-hub:../birds", "a/b/c", "hf-hub:a/b@c d"],
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="is not an address on the Hub: write hf-hub:user/name@revision"):
        HubAddress.of(text)


def test_a_revision_with_a_slash() -> None:
    assert HubAddress.of("hf-hub:ann/birds@refs/pr/1").revision == "refs/pr/1"


def test_without_a_connection_the_cache_is_used(
    hub: Hub, pushed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = read_card(pushed).sha256
    commit = pinned(pushed)
    hub.requests.clear()
    assert read_card(commit).sha256 == wanted
    assert not hub.requests  # a commit never changes
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert read_card(pushed).sha256 == wanted
    with pytest.raises(HubError, match=r"HF_HUB_OFFLINE is set, and covpool.json is not in the cache"):
        read_card("hf-hub:ann/others")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert read_card(pushed).sha256 == wanted
    with pytest.raises(HubError, match=r"cannot connect to http://127.0.0.1:9, and covpool.json is not in"):
        read_card("hf-hub:ann/others")


def test_both_files_are_of_one_commit(hub: Hub, pushed: str, bundle: Path) -> None:
    """Both files come from one commit, even if another commit arrives between the two downloads."""
    weights = (bundle / "model.safetensors").read_bytes()

    def push_meanwhile(handler: Any) -> None:
        hub.put("ann/birds", {"covpool.json": b"{}", "model.safetensors": b"other"})
        handler.resolve("ann/birds", handler.path.split("/")[4], "model.safetensors")

    hub.fault("HEAD", "model.safetensors", push_meanwhile, times=1)
    assert Path(download(HubAddress.of(pushed)), "model.safetensors").read_bytes() == weights


def test_a_pinned_bundle_does_not_change(hub: Hub, pushed: str, tmp_path: Path) -> None:
    commit = pinned(pushed)
    hub.put("ann/birds", {"covpool.json": b"{}"})
    assert load_model(commit).classes == CLASSES
    assert pinned(commit) == commit
    assert pinned(tmp_path / "x") == str(tmp_path / "x")


def test_a_hub_is_not_a_folder_to_save_to(model: PooledClassifier) -> None:
    with pytest.raises(BundleError, match="then use covpool push FOLDER user/name"):
        save_model(model, "hf-hub:ann/birds")


def test_heads_share_a_backbone(bundle: Path, model: PooledClassifier) -> None:
    first = load_model(bundle)
    second = load_model(bundle, backbone=first)
    assert second.backbone is first.backbone
    assert_same(second, model)
    torch.manual_seed(5)
    with pytest.raises(BundleError, match="its head belongs to another backbone"):
        load_model(bundle, backbone=trained())


@pytest.mark.slow
def test_a_head_is_refused_on_the_same_weights_at_another_resolution(tmp_path: Path) -> None:
    strided, kept = (
        covpool.create_model("test_resnet", dim=8, num_classes=2, keep_resolution=keep)
        for keep in (False, True)
    )
    strided.backbone.load_state_dict(kept.backbone.state_dict())
    save_model(kept, tmp_path / "kept")
    with pytest.raises(BundleError, match="another backbone"):
        load_model(tmp_path / "kept", backbone=strided)


def test_the_model_card(hub: Hub, bundle: Path, tmp_path: Path) -> None:
    results = {
        "protocol": "accuracy",
        "date": "2026-11-17T10:00:00+00:00",
        "bundle": {"sha256": read_card(bundle).sha256},
        "data": {"split": "test"},
        "images": 615,
        "metrics": {"top1": 0.709, "top5": 0.93, "loss": 1.0},
        "intervals": {"top1": [0.672, 0.745]},
        "bootstrap": {"resamples": 1000, "level": 0.95},
    }
    (tmp_path / "results.json").write_text(json.dumps(results))
    push_to_hub(bundle, "ann/birds", license="apache-2.0", dataset="ann/photos", results=tmp_path)
    files = hub.repositories["ann/birds"].commits[hub.repositories["ann/birds"].branches["main"]]
    _, front, text = files["README.md"].decode().split("---\n", 2)
    metadata = yaml.safe_load(front)
    assert metadata["library_name"] == "covpool"
    assert metadata["license"] == "apache-2.0"
    assert metadata["pipeline_tag"] == "image-classification"
    assert metadata["datasets"] == ["ann/photos"]
    (entry,) = metadata["model-index"]
    measured = {one["name"]: one["value"] for one in entry["results"][0]["metrics"]}
    assert measured == {"top-1 accuracy": 0.709, "top-5 accuracy": 0.93}
    assert "| top-1 accuracy | 0.7090 | 0.6720 to 0.7450 |" in text
    assert 'covpool.load_model("hf-hub:ann/birds")' in text
    card = read_card("hf-hub:ann/birds")
    assert card.sha256 in text
    assert card.backbone_sha256 in text
    assert "Zaunkönig" in text
    results["bundle"]["sha256"] = "0" * 64
    (tmp_path / "results.json").write_text(json.dumps(results))
    with pytest.raises(UsageError, match="has the results of another model"):
        push_to_hub(bundle, "ann/birds", results=tmp_path)


def test_without_results_the_model_card_says_so(hub: Hub, bundle: Path) -> None:
    push_to_hub(bundle, "ann/birds")
    repository = hub.repositories["ann/birds"]
    text = repository.commits[repository.branches["main"]]["README.md"].decode()
    assert "Reported by training, on its validation images: top-1 accuracy 0.7500." in text
    assert "model-index" not in text
    assert "not stated: ask the authors" in text


def test_no_absolute_path_is_uploaded(hub: Hub, bundle: Path) -> None:
    push_to_hub(bundle, "ann/birds")
    for files in hub.repositories["ann/birds"].commits.values():
        for data in files.values():
            assert b"/home/ann" not in data
            assert b"secret project" not in data
    assert read_card("hf-hub:ann/birds").recipe == {"data": {"path": "birds", "limit": None}, "seed": 3}


def test_an_edited_model_card_is_kept(hub: Hub, bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    push_to_hub(bundle, "ann/birds")
    repository = hub.repositories["ann/birds"]
    text = repository.commits[repository.branches["main"]]["README.md"].decode()
    hub.put("ann/birds", {"README.md": f"{text}\nmore".encode()})
    push_to_hub(bundle, "ann/birds")
    assert not repository.commits[repository.branches["main"]]["README.md"].endswith(b"more")
    hub.put("ann/birds", {"README.md": text.replace(MARK, "Mine.").encode()})
    with caplog.at_level(logging.WARNING, "covpool"):
        push_to_hub(bundle, "ann/birds")
    assert b"Mine." in repository.commits[repository.branches["main"]]["README.md"]
    assert "has a README.md of its own, which is kept" in caplog.text


@pytest.mark.slow
def test_timms_networks_are_backbones(hub: Hub, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = timm.create_model("test_resnet", num_classes=7)
    save_for_hf(theirs, tmp_path / "timm", model_config={"num_classes": 7}, safe_serialization=True)
    commit = hub.put("ann/net", {path.name: path.read_bytes() for path in (tmp_path / "timm").iterdir()})
    ours = covpool.create_model("hf-hub:ann/net", pretrained=True, dim=8, num_classes=3)
    assert ours.config.backbone == "test_resnet"
    assert ours.initial_weights["hub"] == f"hf-hub:ann/net@{commit}"
    for name, tensor in ours.backbone.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name]), name
    assert_same(load_model(save_model(ours, tmp_path / "bundle")), ours.eval())
    untrained = covpool.create_model("hf-hub:ann/net", dim=8, num_classes=3)
    assert untrained.initial_weights == {}
    config = json.loads((tmp_path / "timm" / "config.json").read_text())
    config["model_args"] = {"pretrained_cfg": {"file": "/etc/passwd"}}
    hub.put("ann/net", {"config.json": json.dumps(config).encode()})
    with pytest.raises(HubError, match="does not describe a network of timm"):
        covpool.create_model("hf-hub:ann/net", dim=8)


def test_a_repository_of_timm_is_no_bundle(hub: Hub) -> None:
    hub.put("timm/net", {"config.json": b"{}", "model.safetensors": b""})
    with pytest.raises(HubError, match=r"has no covpool.json.* use it as a backbone with --model"):
        load_model("hf-hub:timm/net")


@needs_pages
@pytest.mark.slow
def test_the_code_of_the_page(
    hub: Hub, pushed: str, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run all blocks of docs/hub.md."""
    hub.put("ann/moths", {path.name: path.read_bytes() for path in bundle.iterdir()})
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (40, 40)).save("photo.jpg")
    names: dict[str, Any] = {}
    for _, block in python_blocks(DOCS / "hub.md"):
        exec(block, names)
    assert names["moths"].backbone is names["birds"].backbone


def test_gated_repositories(hub: Hub, pushed: str) -> None:
    hub.repositories["ann/gated"] = Repository(gated=True)
    with pytest.raises(HubError, match="its authors grant access on request: ask for it at http"):
        load_model("hf-hub:ann/gated")


def test_a_token_is_needed_to_push(hub: Hub, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN + "x")
    with pytest.raises(HubError, match="log in with hf auth login"):
        push_to_hub(bundle, "ann/birds")
