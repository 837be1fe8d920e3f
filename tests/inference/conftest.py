from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch

from covpool.models import create_model, save_model
from tests.inference.small import CLASSES


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network with random weights for six classes and images of 64 pixels."""
    torch.manual_seed(0)
    model = create_model("test_resnet", dim=8, num_classes=len(CLASSES), image_size=64)
    return save_model(model, tmp_path_factory.mktemp("bundle") / "bundle", classes=CLASSES)


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    store = fsspec.filesystem("memory")
    yield store
    store.store.clear()
    store.pseudo_dirs[:] = [""]
