"""Whether a folder's run may be gone on with by a recipe: only where the result stays the same."""

from __future__ import annotations

from pathlib import Path

from covpool.train.recipe import Recipe
from covpool.train.recipe_files import make_recipe, read_recipe
from covpool.train.recipe_options import SHORT, flat

# What does not change a result. The data may have moved: their fingerprints are compared.
FREE = {
    "data.path",
    "data.layout",
    "data.workers",
    "data.cache",
    "data.max_bad",
    "loop.max_skips",
    "loop.device",
    "checkpoint.steps",
    "checkpoint.minutes",
    "checkpoint.keep",
    "trackers",
    "out",
}
# As a recipe leaves them open; a run has filled them in.
OPEN = {
    "model.dim": "auto",
    "model.keep_resolution": None,
    "model.features": None,
}


def as_begun(path: Path, recipe: Recipe) -> Recipe:
    """A recipe for going on with the run whose recipe is at ``path``: what it leaves open is as in that.

    Raises:
        ValueError: with all that differs, if it would be another run.
    """
    if not path.exists():
        return recipe
    before, now = flat(read_recipe(path)), flat(recipe)
    filled = {name for name, value in OPEN.items() if now[name] == value} | {"model.num_classes"}
    now |= {name: before[name] for name in filled}
    short = {key: name for name, key in SHORT.items()}
    differing = [
        f"--{short.get(name, name).replace('_', '-')} {before[name]}, not {value}"
        for name, value in now.items()
        if name not in FREE and before[name] != value
    ]
    if differing:
        raise ValueError(
            f"{path.parent} was begun with {'; '.join(differing)}: give the same again, or another --out"
        )
    return make_recipe(now)
