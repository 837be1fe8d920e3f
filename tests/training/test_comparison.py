"""Two runs of one recipe that differ only in the pooling."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from covpool.training.recipe import Recipe
from covpool.training.recipe_files import read_recipe
from covpool.training.run import compare, compared_recipes
from tests.data.pictures import needs_tiny10
from tests.training.small import SMALL

RECIPE = read_recipe(
    "resnet50-imagenet", {"data.path": "images", "out": "runs", "model.keep_resolution": True}
)


@pytest.mark.slow
@needs_tiny10
def test_both_are_trained_and_one_report_is_written(tmp_path: Path) -> None:
    made = compare(read_recipe(None, {**SMALL, "out": str(tmp_path)}))
    assert made.report == tmp_path / "report.html"
    assert "McNemar" in made.report.read_text("utf-8")
    assert {pool: run.folder for pool, run in made.runs.items()} == {
        "isqrt_cov": tmp_path / "isqrt_cov",
        "gap": tmp_path / "gap",
    }
    first, second = (made.runs[pool].summary for pool in ("isqrt_cov", "gap"))
    assert (first["pool"], first["dim"], second["pool"], second["dim"]) == ("isqrt_cov", 8, "gap", None)
    assert (first["steps"], first["images"]) == (second["steps"], second["images"])
    again = compare(read_recipe(None, {**SMALL, "out": str(tmp_path)}))
    assert all(run.was_finished for run in again.runs.values())


def test_all_else_is_equal() -> None:
    made = compared_recipes(RECIPE, "gap")
    assert list(made) == ["isqrt_cov", "gap"]
    assert made["isqrt_cov"] == dataclasses.replace(RECIPE, out="runs/isqrt_cov")
    model = dataclasses.replace(RECIPE.model, pool="gap", dim="auto", keep_resolution=None, pool_options={})
    assert made["gap"] == dataclasses.replace(RECIPE, out="runs/gap", model=model)


@pytest.mark.parametrize(
    ("recipe", "other", "sentence"),
    [
        (RECIPE, "isqrt_cov", "--compare isqrt_cov is the pooling of the recipe: choose another"),
        (RECIPE, "median", "compare must be one of"),
        (
            compared_recipes(RECIPE, "gap")["gap"],
            "isqrt_cov",
            "the other way round: --pool isqrt_cov --compare gap",
        ),
        (
            read_recipe("resnet50-birds"),
            "gap",
            "a bundle fits one pooling, not both isqrt_cov and gap",
        ),
    ],
)
def test_mistakes_cost_no_training(recipe: Recipe, other: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        compare(recipe, other)
    assert not Path(recipe.out).exists()
