"""Two runs of one recipe that differ in the pooling alone."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from covpool.train.compare import compare, twins
from covpool.train.recipe import Recipe
from covpool.train.recipe_files import read_recipe

RECIPE = read_recipe(
    "resnet50-imagenet", {"data.path": "images", "out": "runs", "model.keep_resolution": True}
)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the loop and the report were asked for."""
    calls: list[Any] = []

    def fit(recipe: Recipe) -> Any:
        calls.append(recipe)
        return SimpleNamespace(folder=Path(recipe.out), summary={}, was_finished=False)

    def write_comparison(folder: Path, runs: Mapping[str, Path]) -> Path:
        calls.append((folder, dict(runs)))
        return folder / "report.html"

    monkeypatch.setitem(sys.modules, "covpool.train.fit", SimpleNamespace(fit=fit))
    fake = SimpleNamespace(write_comparison=write_comparison)
    monkeypatch.setitem(sys.modules, "covpool.train.report", fake)
    return calls


def test_both_are_trained_and_one_report_is_written(called: list[Any]) -> None:
    made = compare(RECIPE)
    folders = {"isqrt_cov": Path("runs/isqrt_cov"), "gap": Path("runs/gap")}
    assert called == [*twins(RECIPE, "gap").values(), (Path("runs"), folders)]
    assert (made.folder, made.report) == (Path("runs"), Path("runs/report.html"))
    assert {pool: run.folder for pool, run in made.runs.items()} == folders


def test_other_processes_write_no_report(called: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert compare(RECIPE, "gap").report is None
    assert called == [*twins(RECIPE, "gap").values()]


def test_all_else_is_equal() -> None:
    made = twins(RECIPE, "gap")
    assert list(made) == ["isqrt_cov", "gap"]
    assert made["isqrt_cov"] == dataclasses.replace(RECIPE, out="runs/isqrt_cov")
    model = dataclasses.replace(RECIPE.model, pool="gap", dim="auto", keep_resolution=None, pool_options={})
    assert made["gap"] == dataclasses.replace(RECIPE, out="runs/gap", model=model)


@pytest.mark.parametrize(
    ("recipe", "other", "sentence"),
    [
        (RECIPE, "isqrt_cov", "there is nothing to compare: the recipe's pooling is isqrt_cov already"),
        (RECIPE, "median", "compare must be one of"),
        (
            read_recipe("resnet50-birds"),
            "gap",
            "a bundle fits one pooling, and isqrt_cov is compared with gap",
        ),
    ],
)
def test_mistakes_cost_no_training(recipe: Recipe, other: str, sentence: str, called: list[Any]) -> None:
    with pytest.raises(ValueError, match=sentence):
        compare(recipe, other)
    assert not called
