"""Training on torch.distributed: recipes, the loop, checkpoints, and the folder that a run leaves.

What this room offers is imported when it is first asked for: the command line needs its recipes alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covpool.train.comparison import Comparison, compare
    from covpool.train.fitting import Run, fit
    from covpool.train.interruption import Interrupted
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
    "Comparison": "comparison",
    "Interrupted": "interruption",
    "Recipe": "recipe",
    "Run": "fitting",
    "compare": "comparison",
    "find_lr": "lr_find",
    "fit": "fitting",
    "read_recipe": "recipe_files",
    "recipe_names": "recipe_files",
    "write_recipe": "recipe_files",
}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_FILES[name]}"), name)
