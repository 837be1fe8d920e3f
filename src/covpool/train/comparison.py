"""Two poolings, all else equal, and one report on both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from covpool.errors import UsageError
from covpool.functional.arguments import check_choice
from covpool.models.config import CLASS_TOKEN
from covpool.nn.pooling import METHODS
from covpool.processes import joined_processes
from covpool.train.recipe import Recipe
from covpool.train.recipe_files import change_pool, flat, make_recipe

if TYPE_CHECKING:
    from covpool.train.fitting import Run


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` did.

    Attributes:
        folder: with a folder for each run, named by its pooling.
        runs: by pooling.
        report: the page on both; ``None`` in processes other than the first, which writes it.
    """

    folder: Path
    runs: dict[str, Run]
    report: Path | None


def compare(recipe: Recipe, other: str = "gap") -> Comparison:
    """Train a recipe's network and the same with another pooling, one after the other.

    Images, their order and augmentation, seed, epochs and all else are the same; the width, the options of
    the pooling and the resolution kept for it are for covariances, and a first-order twin goes without.
    Calling it again goes on where it was interrupted.
    """
    from covpool.train.fitting import fit
    from covpool.train.report import write_comparison

    folder = Path(recipe.out)
    both = twins(recipe, other)
    with joined_processes(recipe.loop.device) as processes:  # once for both runs
        runs = {pool: fit(each) for pool, each in both.items()}
        report = None
        if processes.is_first:
            images = runs[other].images
            report = write_comparison(folder, {pool: run.folder for pool, run in runs.items()}, images)
    return Comparison(folder, runs, report)


def twins(recipe: Recipe, other: str) -> dict[str, Recipe]:
    """The recipe and the one with another pooling, each with a folder of its own."""
    check_choice("compare", other, (*METHODS, CLASS_TOKEN))
    own = recipe.model.pool
    if other == own:
        raise UsageError(f"there is nothing to compare: the recipe's pooling is {own} already")
    if recipe.weights.bundle is not None:
        raise UsageError(f"a bundle fits one pooling, and {own} is compared with {other}: give no bundle")
    values = {own: flat(recipe), other: change_pool(flat(recipe), other)}
    out = Path(recipe.out)
    both = {pool: make_recipe({**values[pool], "out": str(out / pool)}) for pool in values}
    if both[other].model.is_second_order and not both[own].model.is_second_order:
        # Its width and the resolution kept for it would be nobody's: a recipe has them for its own pooling.
        raise UsageError(f"compare the other way round: --pool {other} --compare {own}")
    return both
