"""Suggest a learning rate: raise it step by step, and find where the loss falls fastest.

See Smith, "Cyclical Learning Rates for Training Neural Networks" (2017).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from covpool.arguments import check_whole
from covpool.data.loader import Batch, TrainingLoader
from covpool.data.transforms import Preprocessing
from covpool.errors import UsageError
from covpool.processes import Processes, joined_processes
from covpool.storage.files import replace_file
from covpool.storage.folders import check_outside
from covpool.terminal import Progress
from covpool.training.network import make_model, own_state
from covpool.training.recipe import Recipe, ScheduleOptions
from covpool.training.run_folder import csv_bytes
from covpool.training.splits import make_loader, open_data
from covpool.training.step import Learner, make_objective

LOWEST, HIGHEST = 1e-6, 10.0
# With fewer steps, the learning rates are too far apart for smoothing.
FEWEST_STEPS = 20
# The sweep ends when the smoothed loss is this many times its minimum.
DIVERGED = 4.0
# Losses are clipped at this many times the first, so that one spike does not hide its neighbors.
CEILING = 10.0
# The standard deviation of the smoothing, as a share of the steps: a third of a decade.
SMOOTHING = 1 / 20
# The smoothed loss must fall by this many times its noise. Noise alone exceeds 3.3 in 1 % of sweeps.
CLEAR = 4.0

Column = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, eq=False)
class Sweep:
    """The loss at each learning rate.

    Attributes:
        rates: the learning rates, lowest first.
        losses: the loss of the step at each of them.
        smoothed: the smoothed losses.
        suggestion: where the smoothed loss falls fastest; ``None`` if it hardly falls.
    """

    rates: Column
    losses: Column
    smoothed: Column
    suggestion: float | None


def find_lr(recipe: Recipe, steps: int = 100) -> Sweep:
    """Find a learning rate for a recipe; its own learning rate and schedule are ignored.

    For a recipe with ``schedule.head_first`` it is the learning rate of the head, ``schedule.head_lr``.

    The network trains while the learning rate rises exponentially from 1e-6 to 10, until the loss diverges.
    No weights are saved. ``recipe.out`` gets ``lr_find.png`` and ``lr_find.csv``. Under torchrun all
    processes must call it.

    Args:
        recipe: the recipe.
        steps: the number of steps from the lowest to the highest learning rate.

    Returns:
        The losses, and ``suggestion``: the learning rate, or ``None`` if the loss hardly falls.

    Raises:
        UsageError: if the recipe or the images are not valid.
    """
    check_whole("steps", steps, at_least=FEWEST_STEPS)
    with (
        joined_processes(recipe.loop.device, recipe.loop.timeout) as processes,
        own_state(processes, recipe.loop.deterministic),
    ):
        sweep = _suggest(*_sweep(_rising(recipe), processes, steps), width=steps * SMOOTHING)
        processes.by_first(lambda: _write(Path(recipe.out), sweep))
    return sweep


def is_of_head(recipe: Recipe) -> bool:
    """Whether the result is the learning rate of the head, ``schedule.head_lr``."""
    return recipe.schedule.head_epochs > 0


def _rising(recipe: Recipe) -> Recipe:
    """Return the recipe with a learning rate that rises over an epoch."""
    return dataclasses.replace(
        recipe,
        weights=dataclasses.replace(recipe.weights, freeze="backbone")
        if is_of_head(recipe)
        else recipe.weights,
        optimizer=dataclasses.replace(recipe.optimizer, lr=LOWEST),
        schedule=ScheduleOptions(epochs=1, kind="exponential", final_lr=HIGHEST),
        loop=dataclasses.replace(recipe.loop, ema=None),  # not needed
    )


def _sweep(recipe: Recipe, processes: Processes, steps: int) -> tuple[list[float], list[float]]:
    """Return learning rates and losses, until the loss diverges."""
    check_outside(recipe.out, recipe.data.path, "files of the run")
    images = open_data(recipe.data, recipe.seed).train
    model = make_model(recipe, images.classes, processes)
    loader = make_loader(images, recipe, Preprocessing.of(model.pretrained_cfg), processes)
    objective = make_objective(recipe, images, model)
    # The last step has the highest learning rate, so the epoch of the schedule is one step shorter.
    learner = Learner(model, recipe, processes, objective, batches=steps - 1)
    rates: list[float] = []
    losses: list[float] = []
    with Progress("steps", silent=not processes.is_first) as progress:
        for cursor, batch in enumerate(itertools.islice(_batches(loader), steps)):
            outcome = learner.step(batch, cursor)
            if outcome.counts:  # not finite
                break
            rates.append(learner.lr)
            losses.append(outcome.loss)
            progress(cursor + 1, steps, figures=f"loss {outcome.loss:.3f}, lr {learner.lr:.2g}")
            smoothed = smooth(losses, steps * SMOOTHING)
            if smoothed[-1] > DIVERGED * smoothed.min():
                break
    return rates, losses


def _batches(loader: TrainingLoader) -> Iterator[Batch]:
    """Yield the batches of one epoch after the other."""
    for epoch in itertools.count():
        yield from loader.from_cursor(epoch * loader.batches)


def smooth(losses: list[float], width: float) -> Column:
    """Smooth losses by a Gaussian, its width in steps; unlike a running mean it has no delay."""
    values = np.minimum(losses, CEILING * losses[0])
    steps = np.arange(len(values))
    weights = np.exp(-0.5 * ((steps[:, None] - steps) / width) ** 2)
    smoothed: Column = weights @ values / weights.sum(axis=1)
    return smoothed


def _suggest(rates: list[float], losses: list[float], width: float) -> Sweep:
    if not losses:
        raise UsageError(f"the loss is not finite at the lowest learning rate, {LOWEST}")
    smoothed = smooth(losses, width)
    # After its minimum the loss falls only from a spike.
    until = int(smoothed.argmin()) + 1
    noise = float(np.std(np.array(losses[:until]) - smoothed[:until])) / width**0.5
    fall = smoothed[:until].max() - smoothed[until - 1]
    suggestion = None
    if until > 1 and fall > CLEAR * noise:
        suggestion = rates[int(np.diff(smoothed[:until]).argmin())]  # steps are equal on a scale of logs
    return Sweep(np.array(rates), np.array(losses), smoothed, suggestion)


def _write(folder: Path, sweep: Sweep) -> None:
    from covpool.drawing import LIGHT, png
    from covpool.training.report.figures import draw_sweep  # here, because what draws takes seconds to import

    folder.mkdir(parents=True, exist_ok=True)
    columns = (sweep.rates, sweep.losses, sweep.smoothed)
    replace_file(folder / "lr_find.png", png(draw_sweep(*columns, sweep.suggestion, LIGHT)))
    rows = zip(*(column.tolist() for column in columns), strict=True)
    replace_file(folder / "lr_find.csv", csv_bytes(["lr", "loss", "smoothed"], rows))
