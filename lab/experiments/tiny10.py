"""Train a small ResNet from scratch on ten classes of Tiny-ImageNet: covariance against average pooling.

    python -m lab tiny10 DATA RUNS

Each pooling is trained on 5,000 images of 64 pixels with three seeds. A seed sets the initial weights, the
order and the augmentation, the same for every pooling. The uncompensated row corresponds to the row of the
paper's Table 4 without post-compensation. Rerun the command to resume.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from covpool.training.recipe_files import read_recipe
from covpool.training.run import train_recipe
from lab.record import new_record, record_file, write_record

SEEDS = (0, 1, 2)
NETWORK = {
    "model.backbone": "resnet10t",
    # Narrower than usual. Images are enlarged: at 64 pixels, only 2×2 positions would be left.
    "model.backbone_options": {"channels": [32, 64, 128, 256], "stem_width": 16},
    "model.image_size": 128,
    "model.preprocessing": {"crop_pct": 1.0},
}
TRAINING = {
    "batch_size": 64,
    "schedule.epochs": 15,
    "schedule.kind": "cosine",
    "schedule.warmup": 1.0,
    "optimizer.name": "sgd",
    "optimizer.lr": 0.05,
    "optimizer.classifier_factor": 1,
    "optimizer.momentum": 0.9,
    "optimizer.weight_decay": 5e-4,
    "optimizer.clip": None,
    "loss.mixup": 0.0,
    "loop.ema": None,
    "loop.precision": "bfloat16",
    "loop.channels_last": True,
    "validation.patience": None,
    "data.workers": 0,
}
POOLINGS: dict[str, dict[str, Any]] = {
    "gap": {"model.pool": "gap"},
    "isqrt_cov": {"model.pool": "isqrt_cov", "model.dim": 64},
    "isqrt_cov, uncompensated": {
        "model.pool": "isqrt_cov",
        "model.dim": 64,
        "model.pool_options": {"compensation": "none"},
    },
}


def run(data: Path, runs: Path) -> dict[str, Any]:
    """Train every pooling with every seed, unless it is done, and return the results."""
    summaries_of: dict[str, list[dict[str, Any]]] = {name: [] for name in POOLINGS}
    for seed in SEEDS:
        for name, pooling in POOLINGS.items():
            folder = runs / f"{name.replace(', ', '-')}-{seed}"
            changes = {"data.path": str(data), "seed": seed, "out": str(folder)}
            summary = train_recipe(read_recipe(None, {**NETWORK, **TRAINING, **pooling, **changes})).summary
            summaries_of[name].append(summary)
    return {
        "network": NETWORK,
        "training": TRAINING,
        "rows": [_row(name, summaries) for name, summaries in summaries_of.items()],
    }


def table(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = ["| pooling | top-1 accuracy after the last epoch, % | each seed |", "|---|---|---|"]
    for row in results["rows"]:
        each = ", ".join(f"{100 * trained['last_top1']:.1f}" for trained in row["runs"])
        lines.append(f"| {row['pooling']} | {100 * row['mean']:.1f} ± {100 * row['sd']:.1f} | {each} |")
    return "\n".join(lines)


def _row(name: str, summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a pooling, compared by the last epoch.

    The best epoch would be chosen on the images that it is measured on.
    """
    kept = ("seed", "parameters", "seconds", "source", "versions", "machine")
    runs = [
        {key: summary[key] for key in kept}
        | {"last_top1": summary["last_epoch"]["top1"], "best_top1": summary["metrics"]["top1"]}
        for summary in summaries
    ]
    top1 = [trained["last_top1"] for trained in runs]
    return {"pooling": name, "mean": statistics.mean(top1), "sd": statistics.stdev(top1), "runs": runs}


def main(data: Path, runs: Path, file: Path | None = None) -> None:
    """Train from scratch on ten classes of Tiny-ImageNet. Rerun the command to resume.

    Args:
        data: ten classes of Tiny-ImageNet, with train and val by class.
        runs: folder of the training runs.
        file: results file; by default that of this machine in results/.
    """
    record = new_record("tiny10", ("functional", "nn", "models", "data", "training")) | run(data, runs)
    write_record(file or record_file(record), record, table(record))
    print(table(record))
