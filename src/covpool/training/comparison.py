"""Train with two poolings, all else equal, and report on both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from covpool.errors import UsageError
from covpool.models.config import CLASS_TOKEN
from covpool.nn.pooling import check_method
from covpool.processes import joined_processes
from covpool.training.recipe import Recipe
from covpool.training.recipe_files import change_pool, flat, make_recipe

if TYPE_CHECKING:
    from covpool.training.run import Run


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`.

    Attributes:
        folder: has a folder for each run, named by its pooling.
        runs: the runs by pooling.
        report: the report on both; ``None`` in all processes but the first.
    """

    folder: Path
    runs: dict[str, Run]
    report: Path | None


def compare(recipe: Recipe, other: str = "gap") -> Comparison:
    """Train the network of a recipe, then the same network with another pooling.

    Everything else is the same: images, order, augmentation, seed and epochs. First-order pooling drops the
    options for covariance pooling: see :func:`~covpool.training.recipe_files.change_pool`. Call it again to
    resume after an interruption.
    """
    from covpool.training.report import write_comparison
    from covpool.training.run import train_recipe

    folder = Path(recipe.out)
    both = compared_recipes(recipe, other)
    with joined_processes(recipe.loop.device, recipe.loop.timeout) as processes:  # once for both runs
        runs = {pool: train_recipe(each) for pool, each in both.items()}
        report = None
        if processes.is_first:
            images = runs[other].images
            report = write_comparison(folder, {pool: run.folder for pool, run in runs.items()}, images)
    return Comparison(folder, runs, report)


def compared_recipes(recipe: Recipe, other: str) -> dict[str, Recipe]:
    """Return the recipe and the one with another pooling, each with its own folder."""
    check_method("compare", other, CLASS_TOKEN)
    own = recipe.model.pool
    if other == own:
        raise UsageError(f"--compare {other} is the pooling of the recipe: choose another")
    if recipe.weights.bundle is not None:
        raise UsageError(f"a bundle fits one pooling, not both {own} and {other}: remove --bundle")
    values = {own: flat(recipe), other: change_pool(flat(recipe), other)}
    out = Path(recipe.out)
    both = {pool: make_recipe({**values[pool], "out": str(out / pool)}) for pool in values}
    if both[other].model.is_second_order and not both[own].model.is_second_order:
        # The recipe has no width and no resolution for it.
        raise UsageError(f"compare the other way round: --pool {other} --compare {own}")
    return both
