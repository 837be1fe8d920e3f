from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.pictures import SPARROWS
from tests.evaluate.birds import a_bundle, draw_nothing, some_sparrows


@pytest.fixture(scope="session")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not SPARROWS.is_dir():
        pytest.skip("the sparrows are not next to the project")
    return some_sparrows(tmp_path_factory.mktemp("birds"))


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_bundle(tmp_path_factory.mktemp("models") / "bundle")


@pytest.fixture
def _no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_nothing(monkeypatch)
