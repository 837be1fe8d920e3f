"""Training on torch.distributed: recipes, the loop, checkpoints, and the folder that a run leaves.

What this room offers is imported when it is first asked for: the command line needs its recipes alone.
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
    "Comparison": "covpool.train.comparison",
    "Interrupted": "covpool.processes",
    "Recipe": "covpool.train.recipe",
    "Run": "covpool.train.fitting",
    "compare": "covpool.train.comparison",
    "find_lr": "covpool.train.lr_find",
    "fit": "covpool.train.fitting",
    "read_recipe": "covpool.train.recipe_files",
    "recipe_names": "covpool.train.recipe_files",
    "write_recipe": "covpool.train.recipe_files",
}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_FILES[name]), name)
