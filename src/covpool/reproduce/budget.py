"""How long training takes here, and how many seeds a budget is enough for."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from covpool.data.decode import decode
from covpool.data.transforms import Preprocessing, training_transform
from covpool.errors import UsageError
from covpool.processes import joined_processes
from covpool.reproduce.miniature.configuration import Configuration, Scale
from covpool.train.network import make_model
from covpool.train.splits import open_data
from covpool.wording import duration

UNITS = {"s": 1, "m": 60, "h": 3600}
# Images that reading is timed on, and steps that training is.
READ, STEPS = 64, 2
# Validation runs forward alone: a third of a step.
FORWARD = 1 / 3


def seconds_of(words: str) -> float:
    """A budget as it is written on a command line.

    Example:
        >>> seconds_of("8h"), seconds_of("90m")
        (28800.0, 5400.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", words)
    if found is None:
        raise UsageError(f"a budget is a number and s, m or h, as 8h or 90m; got {words!r}")
    return float(found[1]) * UNITS[found[2]]


def estimated_seconds(configuration: Configuration, scale: Scale, data: Path) -> float:
    """Of a run, from a few steps of it on images of the data."""
    recipe = configuration.recipe(scale, data, Path("nowhere"))
    splits = open_data(recipe.data, recipe.seed)
    assert splits.val is not None
    with joined_processes("cpu") as processes:
        model = make_model(recipe, splits.train.classes, processes)
        transform = training_transform(Preprocessing.of(model.pretrained_cfg), recipe.augmentation)
        started = time.perf_counter()
        read = [transform(decode(splits.train.read(i))) for i in range(min(READ, len(splits.train)))]
        reading = (time.perf_counter() - started) / len(read)
        size = read[0].shape[-1]
        images = torch.randn(recipe.batch_size, 3, size, size).to(memory_format=torch.channels_last)
        labels = torch.zeros(recipe.batch_size, dtype=torch.long)
        for _ in range(STEPS):  # the last one counts
            started = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=recipe.loop.precision == "bfloat16"):
                logits = model(images)
            nn.functional.cross_entropy(logits.float(), labels).backward()
            step = (time.perf_counter() - started) / recipe.batch_size
    train = len(splits.train) * (reading + step)
    val = len(splits.val) * (reading + step * FORWARD)
    return recipe.schedule.epochs * (train + val)


def affordable_seeds(
    left: Callable[[int], Sequence[Configuration]],
    seconds: Callable[[Configuration], float],
    wanted: int,
    budget: float,
) -> int:
    """The most seeds, up to those wanted, whose runs that are not done fit; never fewer rows.

    Raises:
        ValueError: if not even one seed does.
    """
    for seeds in range(wanted, 0, -1):
        needed = sum(seconds(configuration) for configuration in left(seeds))
        if needed <= budget:
            return seeds
    raise UsageError(
        f"one seed of all takes about {duration(needed)}, more than the budget of {duration(budget)}: give "
        "more, or fewer experiments at a time"
    )
