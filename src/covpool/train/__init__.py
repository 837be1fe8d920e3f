"""Train on one or several GPUs: recipes, the loop, checkpoints, and the run folder."""

from typing import TYPE_CHECKING

from covpool import lazily

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

__getattr__ = lazily(__name__, "train", __file__)
