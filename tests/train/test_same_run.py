"""Which recipes may go on with a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from covpool.train.recipe_files import read_recipe, write_recipe
from covpool.train.same_run import check_same_run


@pytest.mark.parametrize(("key", "value"), [("data.cache", "/scratch"), ("data.path", "moved"), ("out", "x")])
def test_what_does_not_change_the_result_may_change(tmp_path: Path, key: str, value: str) -> None:
    write_recipe(read_recipe(), tmp_path / "recipe.yaml")
    check_same_run(tmp_path / "recipe.yaml", read_recipe(None, {key: value}))


def test_what_changes_the_result_may_not(tmp_path: Path) -> None:
    write_recipe(read_recipe(), tmp_path / "recipe.yaml")
    with pytest.raises(ValueError, match=r"was begun with seed 0, not 1: give the same again, or another"):
        check_same_run(tmp_path / "recipe.yaml", read_recipe(None, {"seed": 1}))
