"""Train on torch.distributed: recipes, the loop, checkpoints and reports.

Names are imported on first use: the command line needs only the recipes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covpool.errors import Interrupted
    from covpool.train.comparison import Comparison, compare
    from covpool.train.fitting import Run, fit
    from covpool.train.lr_find import find_lr
    from covpool.train.recipe import Recipe
    from covpool.train.recipe_files import read_recipe, recipe_names, write_recipe

__all__ = [
    "Comparison",
    "Interrupted",
    "Recipe",
    "Run",
    "compare",
    "find_lr",
    "fit",
    "read_recipe",
    "recipe_names",
    "write_recipe",
]

_FILES = {
    "comparison": ("Comparison", "compare"),
    "fitting": ("Interrupted", "Run", "fit"),
    "lr_find": ("find_lr",),
    "recipe": ("Recipe",),
    "recipe_files": ("read_recipe", "recipe_names", "write_recipe"),
}


def __getattr__(name: str) -> Any:
    for file, names in _FILES.items():
        if name in names:
            return getattr(importlib.import_module(f"covpool.train.{file}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
