"""Which recipes may go on with a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from covpool.train.recipe_files import read_recipe, write_recipe
from covpool.train.run_folder import as_begun


@pytest.mark.parametrize(("key", "value"), [("data.cache", "/scratch"), ("data.path", "moved"), ("out", "x")])
def test_what_does_not_change_the_result_may_change(tmp_path: Path, key: str, value: str) -> None:
    write_recipe(read_recipe(), tmp_path / "recipe.yaml")
    recipe = read_recipe(None, {key: value})
    assert as_begun(tmp_path / "recipe.yaml", recipe) == recipe


def test_what_is_left_open_is_as_it_was(tmp_path: Path) -> None:
    write_recipe(read_recipe(None, {"model.dim": 32, "model.num_classes": 7}), tmp_path / "recipe.yaml")
    model = as_begun(tmp_path / "recipe.yaml", read_recipe()).model
    assert (model.dim, model.num_classes) == (32, 7)
    with pytest.raises(ValueError, match="was started with --dim 32, not 64"):
        as_begun(tmp_path / "recipe.yaml", read_recipe(None, {"model.dim": 64}))


def test_what_changes_the_result_may_not(tmp_path: Path) -> None:
    write_recipe(read_recipe(), tmp_path / "recipe.yaml")
    with pytest.raises(ValueError, match=r"was started with --seed 0, not 1: use the same values"):
        as_begun(tmp_path / "recipe.yaml", read_recipe(None, {"seed": 1}))
