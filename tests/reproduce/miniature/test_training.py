from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from covpool.errors import NotFiniteError, TrainingError
from covpool.reproduce.miniature import training
from covpool.reproduce.miniature.configuration import SMALLEST, Configuration
from covpool.reproduce.miniature.observation import observed
from covpool.reproduce.miniature.tiny_imagenet import write_subset
from covpool.reproduce.miniature.training import is_done, trained
from covpool.train.checkpoint import list_checkpoints, read_checkpoint, write_checkpoint
from covpool.train.recipe_files import write_recipe
from covpool.train.run_folder import RunFolder

CONFIGURATION = Configuration("alexnet", "isqrt_cov", {"steps": 3})


@pytest.fixture
def data(tiny_imagenet: Path, tmp_path: Path) -> Path:
    write_subset(tiny_imagenet, 2, tmp_path / "data.csv")
    return tmp_path / "data.csv"


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fit(recipe: Any) -> None:
        Path(recipe.out).mkdir(parents=True)
        write_recipe(recipe, RunFolder(Path(recipe.out)).recipe)
        raise error

    monkeypatch.setattr(training, "fit", fit)


def test_a_loss_that_is_not_finite_is_a_result(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, NotFiniteError("11 steps had a loss or a gradient that is not finite, more than"))
    for _ in range(2):  # the second time it is read
        found = trained(CONFIGURATION, SMALLEST, data, tmp_path)
        assert found["failed"] == "11 steps had a loss or a gradient that is not finite"
    assert is_done(CONFIGURATION, tmp_path)
    recipe = RunFolder(tmp_path / CONFIGURATION.name).recipe
    recipe.write_text(re.sub(r"(?m)^batch_size: \d+", "batch_size: 7", recipe.read_text()))
    with pytest.raises(ValueError, match="was started with --batch-size 7"):
        trained(CONFIGURATION, SMALLEST, data, tmp_path)


def test_other_errors_are_none(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, TrainingError("a worker died"))
    with pytest.raises(TrainingError, match="a worker died"):
        trained(CONFIGURATION, SMALLEST, data, tmp_path)
    assert not is_done(CONFIGURATION, tmp_path)


def test_a_checkpoint_from_the_middle_is_no_epoch(data: Path, tmp_path: Path) -> None:
    trained(CONFIGURATION, SMALLEST, data, tmp_path)
    folder = tmp_path / CONFIGURATION.name / "checkpoints"
    (last,) = list_checkpoints(folder)
    checkpoint = read_checkpoint(last)
    write_checkpoint(folder, type(checkpoint)(checkpoint.step + 5, checkpoint.tensors, checkpoint.state))
    assert [epoch["epoch"] for epoch in observed(CONFIGURATION, SMALLEST, data, tmp_path)] == [0, 1]
