"""A configuration to what came of it: trained once, however often it is asked for."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from covpool.models.bundles.durable import replace_file
from covpool.reproduce.miniature.configuration import Configuration, Scale
from covpool.train.bad_images import TrainingError
from covpool.train.fitting import fit

FAILURE = "failure.json"


def trained(configuration: Configuration, scale: Scale, data: Path, runs: Path) -> dict[str, Any]:
    """Train, or go on with it, or read what is there: errors in percent after each epoch, and the origin.

    A run whose loss ceases to be finite is a result too: it has failed, and says why.
    """
    folder = runs / configuration.name
    try:
        known: dict[str, Any] = json.loads((folder / FAILURE).read_bytes())
        return known | {"seed": configuration.seed}
    except FileNotFoundError:
        pass
    try:
        summary = fit(configuration.recipe(scale, data, runs)).summary
    except TrainingError as error:
        if isinstance(error.__cause__, OSError):  # a full disk says nothing about the method
            raise
        failed = {"failed": str(error).partition(":")[0], "epochs": []}
        replace_file(folder / FAILURE, json.dumps(failed).encode())
        return failed | {"seed": configuration.seed}
    return {
        "seed": configuration.seed,
        "failed": None,
        "epochs": _epochs(folder / "metrics.csv"),
        "parameters": summary["parameters"],
        "seconds": round(summary["seconds"], 1),
        "commit": summary["source"]["commit"],
        "precision": configuration.recipe(scale, data, runs).loop.precision,
    }


def is_done(configuration: Configuration, runs: Path) -> bool:
    """Whether nothing is left to do."""
    folder = runs / configuration.name
    if (folder / FAILURE).exists():
        return True
    try:
        return bool(json.loads((folder / "summary.json").read_bytes())["finished"])
    except FileNotFoundError:
        return False


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
