"""The server of tests/hub_server.py in place of the Hub, and a bundle to push there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http

from covpool.models import PooledClassifier
from covpool.models.saving import save_model
from tests.hub_server import TOKEN, Hub, running
from tests.models.bundles.samples import CLASSES, trained


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Start a new server with an empty cache and no pauses between attempts."""
    with running() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        patient = SimpleNamespace(sleep=lambda seconds: None, time=time.time)
        for module in (_http, file_download):
            monkeypatch.setattr(module, "time", patient)
        huggingface_hub.close_session()
        yield server
        huggingface_hub.close_session()


@pytest.fixture(scope="session")
def model() -> PooledClassifier:
    torch.manual_seed(0)
    return trained()


@pytest.fixture(scope="session")
def bundle(model: PooledClassifier, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = {"data": {"path": "/home/ann/secret project/birds", "limit": None}, "seed": 3}
    folder = tmp_path_factory.mktemp("hub") / "birds"
    return save_model(model, folder, classes=CLASSES, metrics={"top1": 0.75}, recipe=recipe)


@pytest.fixture
def pushed(hub: Hub, bundle: Path) -> str:
    """Return the address of a bundle that is on the server without any requests."""
    hub.put("ann/birds", {path.name: path.read_bytes() for path in bundle.iterdir()})
    return "hf-hub:ann/birds"
