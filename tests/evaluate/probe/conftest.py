"""Real photographs of some sparrow species, weights for small networks, and the results of one probe."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from covpool.evaluate.probe import probe
from tests.data.pictures import SPARROWS
from tests.evaluate.probe.small_probing import OPTIONS, SPECIES


@pytest.fixture(scope="module", autouse=True)
def _weights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Write weights to files in the current folder."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("weights"))
    for name in ("test_efficientnet", "test_vit"):
        torch.manual_seed(0)
        network = timm.create_model(name, num_classes=0)
        torch.save(network.state_dict(), "weights.pth" if name == OPTIONS.model else "vit.pth")
    yield
    os.chdir(before)


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create links to the images of some species."""
    root = tmp_path_factory.mktemp("birds")
    for split in ("train", "test"):
        for species in sorted((SPARROWS / split).iterdir())[:SPECIES]:
            (root / split / species.name).mkdir(parents=True)
            for image in sorted(species.iterdir())[:12]:
                (root / split / species.name / image.name).symlink_to(image)
    return root


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def probed(birds: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return probe(str(birds), OPTIONS, out=tmp_path_factory.mktemp("out") / "probe", cache=cache)
