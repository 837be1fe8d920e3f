"""Train on one or several GPUs: recipes, the loop, checkpoints, and the run folder."""

from typing import TYPE_CHECKING

from covpool import lazily

if TYPE_CHECKING:
    from covpool.errors import Interrupted
    from covpool.training.lr_find import find_lr
    from covpool.training.recipe import Recipe
    from covpool.training.recipe_files import read_recipe, recipe_names, write_recipe
    from covpool.training.run import Comparison, Run, compare, train, train_recipe

__all__ = [
    "Comparison",
    "Interrupted",
    "Recipe",
    "Run",
    "compare",
    "find_lr",
    "read_recipe",
    "recipe_names",
    "train",
    "train_recipe",
    "write_recipe",
]

__getattr__ = lazily(
    __name__,
    "train",
    {
        "covpool.errors": "Interrupted",
        "covpool.training.run": "Comparison Run compare train train_recipe",
        "covpool.training.lr_find": "find_lr",
        "covpool.training.recipe": "Recipe",
        "covpool.training.recipe_files": "read_recipe recipe_names write_recipe",
    },
)
