"""A configuration to what came of it: trained once, however often it is asked for."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from covpool.durable import replace_file
from covpool.errors import NotFiniteError
from covpool.provenance.machine import describe_source
from covpool.reproduce.miniature.configuration import Configuration, Scale
from covpool.train.fitting import fit
from covpool.train.recipe import Recipe
from covpool.train.run_folder import RunFolder, as_begun

FAILURE = "failure.json"
# The rooms that a run depends on.
SOURCE = ("functional", "nn", "models", "data", "train")


def trained(configuration: Configuration, scale: Scale, data: Path, runs: Path) -> dict[str, Any]:
    """Train, or go on with it, or read what is there: errors in percent after each epoch, and the origin.

    A run whose loss ceases to be finite is a result too: it has failed, and says why.
    """
    recipe = configuration.recipe(scale, data, runs)
    folder = Path(recipe.out)
    if (failure := _failure(configuration, folder, recipe)) is not None:
        return failure
    try:
        summary = fit(recipe).summary
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
    """Of a run of the same recipe that failed before.

    Raises:
        ValueError: if it was another recipe.
    """
    try:
        known = json.loads((folder / FAILURE).read_bytes())
    except FileNotFoundError:
        return None
    as_begun(RunFolder(folder).recipe, recipe)
    return {"seed": configuration.seed, "epochs": [], **known}


def is_done(configuration: Configuration, runs: Path) -> bool:
    """Whether nothing is left to do."""
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
