"""Whether a folder's run may be gone on with by another recipe: only where the result stays the same."""

from __future__ import annotations

from pathlib import Path

from covpool.train.recipe import Recipe
from covpool.train.recipe_files import read_recipe
from covpool.train.recipe_options import flat

# What does not change a result. The data may have moved: their fingerprint is checked.
FREE = {
    "data.path",
    "data.layout",
    "data.workers",
    "data.max_bad",
    "data.cache",
    "loop.max_skips",
    "loop.device",
    "checkpoint.steps",
    "checkpoint.minutes",
    "checkpoint.keep",
    "trackers",
    "out",
}
# Left open in a recipe, and filled in when the model was made.
FILLED = {
    "model.num_classes": None,
    "model.dim": "auto",
    "model.keep_resolution": None,
    "model.features": None,
}


def check_same_run(path: Path, recipe: Recipe) -> None:
    """Raise if the recipe of a run that was begun, at ``path``, is not this one.

    Raises:
        ValueError: with what differs first.
    """
    if not path.exists():
        return
    before, now = flat(read_recipe(path)), flat(recipe)
    for name in now.keys() - FREE:
        is_open = name == "model.num_classes" or (name in FILLED and now[name] == FILLED[name])
        if before[name] != now[name] and not is_open:
            raise ValueError(
                f"{path.parent} was begun with {name} {before[name]}, not {now[name]}: "
                "give the same again, or another --out"
            )
