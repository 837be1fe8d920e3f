"""A configuration to what came of it: trained once, however often it is asked for."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from covpool.models.bundles.durable import replace_file
from covpool.models.bundles.strict_json import plain_json
from covpool.reproduce.miniature.configuration import Configuration, Scale
from covpool.train.bad_images import NotFiniteError
from covpool.train.fitting import fit
from covpool.train.recipe import Recipe
from covpool.train.run_folder import RunFolder

FAILURE = "failure.json"


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
        told = {"recipe": asdict(recipe), "failed": str(error).partition(",")[0]}
        replace_file(folder / FAILURE, json.dumps(plain_json("failure", told)).encode())
        return {"seed": configuration.seed, "failed": told["failed"], "epochs": []}
    return {
        "seed": configuration.seed,
        "failed": None,
        "epochs": _epochs(folder / "metrics.csv"),
        "parameters": summary["parameters"],
        "seconds": round(summary["seconds"], 1),
        "commit": summary["source"]["commit"],
        "precision": recipe.loop.precision,
    }


def _failure(configuration: Configuration, folder: Path, recipe: Recipe) -> dict[str, Any] | None:
    """Of a run of the same recipe that failed before."""
    try:
        known = json.loads((folder / FAILURE).read_bytes())
    except FileNotFoundError:
        return None
    if known["recipe"] != plain_json("recipe", asdict(recipe)):
        raise ValueError(f"{folder} is of a run that was made otherwise: give another --runs")
    return {"seed": configuration.seed, "failed": known["failed"], "epochs": []}


def is_done(configuration: Configuration, runs: Path) -> bool:
    """Whether nothing is left to do."""
    folder = runs / configuration.name
    return (folder / FAILURE).exists() or RunFolder(folder).read_summary() is not None


def _epochs(file: Path) -> list[dict[str, float]]:
    with file.open(encoding="utf-8", newline="") as lines:
        return [
            {
                "top1_error": round(100 * (1 - float(row["top1"])), 3),
                "top5_error": round(100 * (1 - float(row["top5"])), 3),
                "train_loss": round(float(row["train_loss"]), 5),
                "train_error": round(100 * (1 - float(row["train_top1"])), 3),
            }
            for row in csv.DictReader(lines)
        ]
