"""Which learning rate to take: it is raised step by step, and the loss tells.

As in Smith, "Cyclical Learning Rates for Training Neural Networks" (2017): far too low a rate changes little,
far too high a one makes the loss explode, and a good one to begin with is where the loss falls fastest.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from covpool.data.batch import Batch
from covpool.data.loader import TrainingLoader
from covpool.data.transforms import Preprocessing
from covpool.durable import check_outside, replace_file
from covpool.errors import UsageError
from covpool.functional.arguments import check_whole
from covpool.processes import Processes, joined_processes
from covpool.progress import Progress
from covpool.train.network import make_model, own_state
from covpool.train.recipe import Recipe, ScheduleOptions
from covpool.train.run_folder import csv_bytes
from covpool.train.splits import make_loader, open_data
from covpool.train.step import Learner, make_objective

LOWEST, HIGHEST = 1e-6, 10.0
# With fewer steps neighbouring rates are so far apart that nothing can be smoothed.
FEWEST_STEPS = 20
# The smoothed loss over its minimum at which there is nothing more to learn.
DIVERGED = 4.0
# A loss counts as so many times the first at most, or one explosion would hide all that is near it.
CEILING = 10.0
# The width of the smoothing, a standard deviation, over the number of steps: a third of a decade.
SMOOTHING = 1 / 20
# A fall of the smoothed loss is clear if it is so many times what is left of the noise in it. Of noise alone
# one in a hundred has more than 3.3 of it.
CLEAR = 4.0

Column = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, eq=False)
class Sweep:
    """What each rate came to.

    Attributes:
        rates: that were tried, from the lowest.
        losses: of the step at each rate.
        smoothed: the losses without most of their noise.
        suggestion: the rate at which the smoothed loss fell fastest; ``None`` if it hardly fell.
    """

    rates: Column
    losses: Column
    smoothed: Column
    suggestion: float | None


def find_lr(recipe: Recipe, steps: int = 100) -> Sweep:
    """Find a learning rate for a recipe, whose own rate and schedule do not matter.

    Of a recipe in two stages it is the rate of the first, in which pooling and classifier learn alone: such a
    recipe never trains all of a network whose head is cold.

    The network learns from the training images while the rate rises exponentially from 1e-6 to 10, until the
    loss explodes. Nothing is saved of it: ``recipe.out`` gets a figure, ``lr_find.png``, and its numbers,
    ``lr_find.csv``. Under torchrun all processes call it.

    Args:
        recipe: of the run to come.
        steps: from the lowest rate to the highest. More of them show more.

    Raises:
        ValueError: in a sentence, if the recipe or the images are not what they should be.
    """
    check_whole("steps", steps, at_least=FEWEST_STEPS)
    with (
        joined_processes(recipe.loop.device) as processes,
        own_state(processes, recipe.loop.deterministic),
    ):
        found = _suggest(*_sweep(_rising(recipe), processes, steps), width=steps * SMOOTHING)
        processes.by_first(lambda: _write(Path(recipe.out), found))
    return found


def is_of_head(recipe: Recipe) -> bool:
    """Whether the rate that is found is that of the first of two stages, ``schedule.head_lr``."""
    return recipe.schedule.head_epochs > 0


def _rising(recipe: Recipe) -> Recipe:
    """The recipe with a rate that rises over an epoch."""
    return dataclasses.replace(
        recipe,
        weights=dataclasses.replace(recipe.weights, freeze="backbone")
        if is_of_head(recipe)
        else recipe.weights,
        optimizer=dataclasses.replace(recipe.optimizer, lr=LOWEST),
        schedule=ScheduleOptions(epochs=1, kind="exponential", final_lr=HIGHEST),
        loop=dataclasses.replace(recipe.loop, ema=None),  # an average of weights that nobody looks at
    )


def _sweep(recipe: Recipe, processes: Processes, steps: int) -> tuple[list[float], list[float]]:
    """Rates and losses, until the loss is not finite or a multiple of what it was."""
    check_outside(recipe.out, recipe.data.path, "files of the run")
    images = open_data(recipe.data, recipe.seed).train
    model = make_model(recipe, images.classes, processes)
    loader = make_loader(images, recipe, Preprocessing.of(model.pretrained_cfg), processes)
    objective = make_objective(recipe, images, processes.device)
    # The last step is to have the highest rate, so what is an epoch for the schedule ends one before.
    learner = Learner(model, recipe, processes, objective, batches=steps - 1)
    rates: list[float] = []
    losses: list[float] = []
    with Progress("steps", silent=not processes.is_first) as progress:
        for cursor, batch in enumerate(itertools.islice(_batches(loader), steps)):
            outcome = learner.step(batch, cursor)
            if outcome.counts:  # as a fault: not finite
                break
            rates.append(learner.lr)
            losses.append(outcome.loss)
            progress(cursor + 1, steps, figures=f"loss {outcome.loss:.3f}, lr {learner.lr:.2g}")
            smoothed = smooth(losses, steps * SMOOTHING)
            if smoothed[-1] > DIVERGED * smoothed.min():
                break
    return rates, losses


def _batches(loader: TrainingLoader) -> Iterator[Batch]:
    """One epoch after the other."""
    for epoch in itertools.count():
        yield from loader.from_cursor(epoch * loader.batches)


def smooth(losses: list[float], width: float) -> Column:
    """The means of neighbours, by a Gaussian of a width in steps; it is not late, as a running mean is."""
    values = np.minimum(losses, CEILING * losses[0])
    steps = np.arange(len(values))
    weights = np.exp(-0.5 * ((steps[:, None] - steps) / width) ** 2)
    smoothed: Column = weights @ values / weights.sum(axis=1)
    return smoothed


def _suggest(rates: list[float], losses: list[float], width: float) -> Sweep:
    if not losses:
        raise UsageError(f"the loss is not finite at a learning rate of {LOWEST} already")
    smoothed = smooth(losses, width)
    # Beyond its minimum the loss falls only after it has exploded.
    until = int(smoothed.argmin()) + 1
    noise = float(np.std(np.array(losses[:until]) - smoothed[:until])) / width**0.5
    fall = smoothed[:until].max() - smoothed[until - 1]
    suggestion = None
    if until > 1 and fall > CLEAR * noise:
        suggestion = rates[int(np.diff(smoothed[:until]).argmin())]  # steps are equal on a scale of logs
    return Sweep(np.array(rates), np.array(losses), smoothed, suggestion)


def _write(folder: Path, sweep: Sweep) -> None:
    from covpool.drawing import LIGHT, png
    from covpool.train.report.figures import draw_sweep  # here, because what draws takes seconds to import

    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "lr_find.png", png(draw_sweep(sweep, LIGHT)))
    columns = (sweep.rates, sweep.losses, sweep.smoothed)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    replace_file(folder / "lr_find.csv", csv_bytes(["lr", "loss", "smoothed"], rows))
