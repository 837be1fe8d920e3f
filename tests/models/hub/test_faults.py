"""A Hub with wrong, slow or missing responses: one error sentence without the token, no damaged model."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from covpool.errors import HubError
from covpool.models.bundle import load_model, read_card
from covpool.models.push import push_to_hub
from tests.hub_server import (
    TOKEN,
    Handler,
    Hub,
    changed,
    close,
    cut,
    redirect_to_itself,
    shorter,
    status,
    text,
)

CARD, WEIGHTS, CDN = "/resolve/.*covpool.json", "/resolve/.*model.safetensors", "/cdn/"
NOT_A_HUB = "does not answer as the Hub does"
Act = Callable[[Handler], None]

# The request (method and path), the fault, and the error message.
DOWNLOADS: dict[str, tuple[str, str, Act, str]] = {
    "401": ("HEAD", CARD, status(401), "log in with hf auth login"),
    "403": ("HEAD", CARD, status(403), "your token does not allow this"),
    "404": ("HEAD", CARD, status(404, "RepoNotFound"), "there is no such repository"),
    "no such file": ("HEAD", WEIGHTS, status(404, "EntryNotFound"), "has no model.safetensors"),
    "418": ("HEAD", CARD, status(418), "answers with status 418"),
    "429": ("HEAD", CARD, status(429, Retry_After="1"), "status 429.: try again later, or log in"),
    "500": ("HEAD", CARD, status(500), "answers with status 500: try again later"),
    "503 of the weights": ("HEAD", WEIGHTS, status(503), "answers with status 503"),
    "403 of the storage": ("GET", CDN, status(403), "your token does not allow this"),
    "500 of the storage": ("GET", CDN, status(500), "answers with status 500"),
    "a redirect loop": ("HEAD", CARD, redirect_to_itself, "redirects without end"),
    "a login page": ("HEAD", CARD, text(b"<html>", ETag="x"), NOT_A_HUB),
    "no ETag": ("HEAD", CARD, text(b"{}", X_Repo_Commit="0" * 40), NOT_A_HUB),
    "no answer": ("HEAD", CARD, close, "broke or timed out: try again"),
    "no answer of the storage": ("GET", CDN, close, "broke or timed out: try again"),
    "a wrong size": ("GET", CDN, shorter, "model.safetensors arrived with a wrong size"),
}
UPLOADS: dict[str, tuple[str, str, Act, str]] = {
    "401 at create": ("POST", "/repos/create", status(401), "log in with hf auth login"),
    "403 at create": ("POST", "/repos/create", status(403), "does not allow this"),
    "500 at create": ("POST", "/repos/create", status(500), "status 500"),
    "bad JSON at create": ("POST", "/repos/create", text(b"<html>"), NOT_A_HUB),
    "bad JSON at preupload": ("POST", "/preupload/", text(b'{"files": 3'), NOT_A_HUB),
    "no files at preupload": ("POST", "/preupload/", text(b"{}"), NOT_A_HUB),
    "429 at preupload": ("POST", "/preupload/", status(429), "status 429"),
    "bad JSON at the batch": ("POST", "/objects/batch", text(b"[]"), NOT_A_HUB),
    "an error in the batch": (
        "POST",
        "/objects/batch",
        text(b'{"objects": [{"oid": "0", "size": 1, "error": {"code": 1, "message": "x"}}]}'),
        NOT_A_HUB,
    ),
    "403 of the storage": ("PUT", "/lfs/", status(403), "does not allow this"),
    "the storage breaks off": ("PUT", "/lfs/", close, "broke or timed out"),
    "the storage lost it": ("POST", "/lfs-verify", status(404), "status 404"),
    "a conflict at the commit": ("POST", "/commit/", status(412), "status 412"),
    "500 at the commit": ("POST", "/commit/", status(500), "status 500"),
    "bad JSON at the commit": ("POST", "/commit/", text(b"{}"), NOT_A_HUB),
    "no answer at the commit": ("POST", "/commit/", close, "broke or timed out"),
}


def refused(call: Callable[[], Any], sentence: str) -> None:
    """Check that the call raises one printable sentence, and that no traceback has the token."""
    with pytest.raises(HubError, match=sentence) as caught:
        call()
    message = str(caught.value)
    assert message.startswith("hf-hub:ann/birds")
    assert message.isprintable()
    assert TOKEN not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("name", DOWNLOADS)
def test_download(hub: Hub, pushed: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    method, path, act, sentence = DOWNLOADS[name]
    hub.fault(method, path, act)
    with caplog.at_level(logging.DEBUG, "covpool"):
        refused(lambda: read_card(pushed), sentence)
    assert TOKEN not in caplog.text
    hub.faults.clear()
    read_card(pushed)  # nothing damaged is left behind
    assert_no_token(Path(constants.HF_HUB_CACHE))


@pytest.mark.parametrize("name", UPLOADS)
def test_upload(hub: Hub, bundle: Path, name: str) -> None:
    method, path, act, sentence = UPLOADS[name]
    hub.fault(method, path, act)
    refused(lambda: push_to_hub(bundle, "ann/birds"), sentence)
    for repository in hub.repositories.values():  # all files or none
        assert "covpool.json" not in repository.commits[repository.branches["main"]]
    hub.faults.clear()
    push_to_hub(bundle, "ann/birds")
    assert read_card("hf-hub:ann/birds").sha256 == read_card(bundle).sha256


def assert_no_token(folder: Path) -> None:
    assert folder.is_dir()
    for path in folder.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes()


@pytest.mark.parametrize("code", [429, 500, 502, 503, 504])
def test_a_fault_that_passes_is_waited_for(hub: Hub, pushed: str, code: int) -> None:
    hub.fault("HEAD", CARD, status(code), times=2)
    read_card(pushed)


def test_a_download_that_is_cut_in_the_middle_is_continued(hub: Hub, pushed: str) -> None:
    hub.fault("GET", CDN, cut, times=1)
    read_card(pushed)
    assert hub.asked("GET", CDN) == 2


def test_a_download_that_is_always_cut(hub: Hub, pushed: str) -> None:
    hub.fault("GET", CDN, cut)
    with pytest.raises(HubError, match=r"broke or timed out|wrong size"):
        read_card(pushed)
    hub.faults.clear()
    read_card(pushed)


def test_a_wrong_hash_is_downloaded_once_more(hub: Hub, pushed: str) -> None:
    hub.fault("GET", CDN, changed, times=1)
    read_card(pushed)
    assert hub.asked("GET", CDN) == 2


@pytest.mark.parametrize("read", [load_model, read_card])
def test_a_wrong_hash_is_refused(hub: Hub, pushed: str, read: Callable[[str], object]) -> None:
    hub.fault("GET", CDN, changed)
    with pytest.raises(ValueError, match=r"model.safetensors is damaged or belongs to another card"):
        read(pushed)
    hub.faults.clear()
    read(pushed)


def test_a_damaged_copy_in_the_cache_is_replaced(hub: Hub, pushed: str) -> None:
    read_card(pushed)
    for name in ("covpool.json", "model.safetensors"):
        (blob,) = {path.resolve() for path in Path(constants.HF_HUB_CACHE).rglob(f"snapshots/*/{name}")}
        blob.write_bytes(blob.read_bytes()[:-1])
        read_card(pushed)


def test_with_a_copy_in_the_cache_a_hub_that_fails_is_no_error(hub: Hub, pushed: str) -> None:
    read_card(pushed)
    hub.fault("HEAD", CARD, status(500))
    read_card(pushed)


def test_a_full_disk_is_reported_as_such(hub: Hub, pushed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device", "/cache")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", full)
    with pytest.raises(OSError, match="No space left") as caught:
        read_card(pushed)
    assert caught.value.errno == 28


@pytest.mark.parametrize("end", ["…", "\x00"])
def test_a_token_that_no_request_can_have_is_not_printed(
    hub: Hub, pushed: str, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: f"{TOKEN}{end}")
    with pytest.raises(HubError) as caught:
        read_card(pushed)
    assert TOKEN not in "".join(traceback.format_exception(caught.value))
