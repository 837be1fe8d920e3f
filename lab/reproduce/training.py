"""Train one configuration on a part of Tiny-ImageNet, and estimate the time it takes."""

from __future__ import annotations

import csv
import json
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from covpool.data.decode import decode
from covpool.data.transforms import Preprocessing, training_transform
from covpool.errors import NotFiniteError, UsageError
from covpool.processes import joined_processes
from covpool.provenance import describe_source
from covpool.storage.files import replace_file
from covpool.storage.remote import trust_rows
from covpool.terminal import duration
from covpool.training.network import make_model
from covpool.training.recipe import Recipe
from covpool.training.run import train_recipe
from covpool.training.run_folder import RunFolder, as_begun, csv_bytes
from covpool.training.splits import open_data
from lab.reproduce.networks import Configuration, Scale

# Seed of the choice of classes, the same in every experiment.
SEED = 0
LINK = "tiny-imagenet-200"


def write_subset(folder: Path, classes: int, file: Path) -> None:
    """Write a CSV of the train and val images of some classes of ``tiny-imagenet-200``.

    The classes are chosen with a fixed seed.

    Raises:
        ValueError: if the folder is not Tiny-ImageNet or has fewer classes.
    """
    try:
        known = sorted((folder / "wnids.txt").read_text(encoding="utf-8").split())
        lines = (folder / "val" / "val_annotations.txt").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise UsageError(
            f"{folder} is not Tiny-ImageNet, {error.filename} is missing: give --data the folder "
            "tiny-imagenet-200 with wnids.txt, train and val"
        ) from error
    if classes > len(known):
        raise UsageError(f"{folder} has {len(known)} classes, fewer than {classes}")
    chosen = set(random.Random(SEED).sample(known, classes))
    file.parent.mkdir(parents=True, exist_ok=True)
    # Paths go through a link next to the CSV, so runs can resume after the images are moved.
    link = file.with_name(LINK)
    link.unlink(missing_ok=True)
    link.symlink_to(folder.resolve())
    rows = [*_train(folder, sorted(chosen)), *_val(lines, chosen)]
    replace_file(file, csv_bytes(("path", "label", "split"), rows))


def _train(folder: Path, classes: list[str]) -> Iterator[tuple[str, str, str]]:
    for name in classes:
        for image in sorted((folder / "train" / name / "images").iterdir()):
            yield f"{LINK}/train/{name}/images/{image.name}", name, "train"


def _val(lines: list[str], classes: set[str]) -> Iterator[tuple[str, str, str]]:
    for line in lines:
        image, name, *_ = line.split("\t")
        if name in classes:
            yield f"{LINK}/val/images/{image}", name, "val"


FAILURE = "failure.json"
# The packages that a run depends on.
SOURCE = ("functional", "nn", "models", "data", "training")


def trained(configuration: Configuration, scale: Scale, data: Path, runs: Path) -> dict[str, Any]:
    """Train a configuration, resume it, or read its results.

    Returns:
        Errors in percent after each epoch, and the provenance. A run whose loss becomes non-finite is a
        result too; ``failed`` holds the reason.
    """
    recipe = configuration.recipe(scale, data, runs)
    folder = Path(recipe.out)
    if (failure := _failure(configuration, folder, recipe)) is not None:
        return failure
    try:
        with trust_rows():  # this program wrote the table, whose paths go through a link
            summary = train_recipe(recipe).summary
    except NotFiniteError as error:
        failed = {"failed": str(error).partition(",")[0], "source": describe_source(SOURCE)}
        replace_file(folder / FAILURE, json.dumps(failed).encode())
        return {"seed": configuration.seed, "epochs": [], **failed}
    rows = _rows(folder / "metrics.csv")
    return {
        "seed": configuration.seed,
        "failed": None,
        "epochs": [_epoch(row) for row in rows],
        "parameters": summary["parameters"],
        "seconds": round(sum(float(row["seconds"]) for row in rows), 1),
        "precision": recipe.loop.precision,
        **{key: summary[key] for key in ("source", "versions", "machine")},
    }


def _failure(configuration: Configuration, folder: Path, recipe: Recipe) -> dict[str, Any] | None:
    """Return the record of an earlier failed run of the same recipe, if there is one.

    Raises:
        ValueError: if the failed run had another recipe.
    """
    try:
        known = json.loads((folder / FAILURE).read_bytes())
    except FileNotFoundError:
        return None
    as_begun(RunFolder(folder).recipe, recipe)
    return {"seed": configuration.seed, "epochs": [], **known}


def is_done(configuration: Configuration, runs: Path) -> bool:
    """Return whether a run is complete."""
    folder = runs / configuration.name
    return (folder / FAILURE).exists() or RunFolder(folder).read_summary() is not None


def _rows(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def _epoch(row: dict[str, str]) -> dict[str, float]:
    return {
        "top1_error": round(100 * (1 - float(row["top1"])), 3),
        "top5_error": round(100 * (1 - float(row["top5"])), 3),
        "train_loss": round(float(row["train_loss"]), 5),
        "train_error": round(100 * (1 - float(row["train_top1"])), 3),
    }


UNITS = {"s": 1, "m": 60, "h": 3600}
# Number of images for timing data loading, and of steps for timing training.
READ, STEPS = 64, 2
# Validation runs only forward, about a third of a training step.
FORWARD = 1 / 3


def seconds_of(words: str) -> float:
    """Parse a time budget of the command line into seconds.

    Example:
        >>> seconds_of("8h"), seconds_of("90m")
        (28800.0, 5400.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", words)
    if match is None:
        raise UsageError(f"--budget must be a number and s, m or h, such as 8h or 90m; got {words!r}")
    return float(match[1]) * UNITS[match[2]]


def estimated_seconds(configuration: Configuration, scale: Scale, data: Path) -> float:
    """Estimate the duration of a run from a few of its steps."""
    recipe = configuration.recipe(scale, data, Path("nowhere"))
    with trust_rows():
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
    most: int,
    budget: float,
) -> int:
    """Return the largest number of seeds, up to ``most``, whose missing runs fit the budget.

    The budget reduces seeds, never rows.

    Raises:
        ValueError: if the budget is too small for one seed.
    """
    for seeds in range(most, 0, -1):
        needed = sum(seconds(configuration) for configuration in left(seeds))
        if needed <= budget:
            return seeds
    raise UsageError(
        f"one seed of all runs takes about {duration(needed)}, more than --budget {duration(budget)}: use a "
        "larger budget, or run fewer experiments at a time"
    )
