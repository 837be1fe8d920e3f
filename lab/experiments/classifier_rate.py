"""Choose the learning rate of the classifier for training from scratch, on ten classes of Tiny-ImageNet.

    python -m lab classifier_rate DATA RUNS

A larger scale of the pooled vector acts on SGD like a higher learning rate of the classifier: a factor s on
the vector is a factor of s² on the learning rate. So only the learning rate is varied, with SGD and with the
recipe ``modern`` (AdamW), which is also trained for longer and with average pooling, because its factor is
the default of ``covpool train``. A tenth of the training images is held out to choose the epoch and the
factor. The images of ``val`` are the test images. Rerun the command to resume; results are written after
each run.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from covpool.training.recipe_files import read_recipe
from covpool.training.run import train_recipe
from lab.experiments import tiny10
from lab.experiments.tiny10 import SEEDS, TRAINING
from lab.record import new_record, record_file, resumed, write_record

# Half as wide as that of tiny10, to reduce the cost.
NETWORK = tiny10.NETWORK | {"model.backbone_options": {"channels": [16, 32, 64, 128], "stem_width": 8}}
POOLINGS: dict[str, dict[str, Any]] = {
    "isqrt_cov": {"model.pool": "isqrt_cov", "model.dim": 64},
    "gap": {"model.pool": "gap"},
}
SHARED = {
    "loop.channels_last": True,
    "validation.patience": None,
    "data.workers": 0,
    "data.val_fraction": 0.1,
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": TRAINING | SHARED,  # in bfloat16 too
    "modern": SHARED,
    "modern, bfloat16": SHARED | {"loop.precision": "bfloat16"},
}
KEYS = ("optimizer", "epochs", "pooling", "factor", "seed")
# Values of KEYS without factor and seed, and the factors. Each is trained with all seeds.
SWEEPS = {
    ("SGD", 5, "isqrt_cov"): (1, 4, 16),
    ("modern", 5, "isqrt_cov"): (1, 4, 16),
    ("modern, bfloat16", 15, "isqrt_cov"): (1, 16),
    ("modern, bfloat16", 15, "gap"): (1, 16),
}


def folder_of_splits(data: Path, runs: Path) -> Path:
    """Return a folder in which ``val`` of the data is the test split."""
    folder = runs / "data"
    folder.mkdir(parents=True, exist_ok=True)
    for name, split in (("train", "train"), ("test", "val")):
        if not (folder / name).exists():
            (folder / name).symlink_to((data / split).resolve())
    return folder


def run(data: Path, runs: Path, key: tuple[Any, ...]) -> dict[str, Any]:
    """Train a network, unless it is done; return its accuracies on held-out and on test images."""
    optimizer, epochs, pooling, factor, seed = key
    changes = {
        "data.path": str(data),
        "seed": seed,
        "out": str(runs / "-".join(map(str, key))),
        "schedule.epochs": epochs,
        "optimizer.classifier_factor": factor,
    }
    summary = train_recipe(
        read_recipe("modern", {**NETWORK, **OPTIMIZERS[optimizer], **POOLINGS[pooling], **changes})
    ).summary
    return {
        **dict(zip(KEYS, key, strict=True)),
        **{name: summary[name] for name in ("seconds", "source", "versions", "machine")},
        "held_out": summary["validation"]["top1"],
        "test": summary["metrics"]["top1"],
    }


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what identifies a run."""
    return tuple(row[name] for name in KEYS)


def by_factor(rows: list[dict[str, Any]], sweep: tuple[str, int, str]) -> dict[int, list[dict[str, Any]]]:
    """Return the runs of a sweep by factor, with the seeds that are finished for every factor."""
    of_sweep = [row for row in rows if key_of(row)[:3] == sweep]
    by_value = {factor: [row for row in of_sweep if row["factor"] == factor] for factor in SWEEPS[sweep]}
    seeds = set.intersection(*({row["seed"] for row in some} for some in by_value.values()))
    return {
        factor: [row for row in some if row["seed"] in seeds] for factor, some in by_value.items() if seeds
    }


def chosen(rows: list[dict[str, Any]], sweep: tuple[str, int, str]) -> int:
    """Return the factor with the best mean accuracy on held-out images."""
    by_value = by_factor(rows, sweep)
    return max(by_value, key=lambda factor: statistics.mean(row["held_out"] for row in by_value[factor]))


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    lines = [
        "Top-1 accuracy in percent, mean ± standard deviation over seeds. The factor with the best accuracy",
        "on held-out training images is in bold.",
        "",
        "| optimizer | epochs | pooling | factor of the classifier | seeds | held out | test |",
        "|---|---|---|---|---|---|---|",
    ]
    for sweep in SWEEPS:
        for factor, some in by_factor(rows, sweep).items():
            name = f"**{factor}**" if factor == chosen(rows, sweep) else str(factor)
            cells = [*map(str, sweep), name, str(len(some)), _cell(some, "held_out"), _cell(some, "test")]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(rows: list[dict[str, Any]], name: str) -> str:
    values = [100 * row[name] for row in rows]
    return f"{statistics.mean(values):.1f}" + (
        f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    )


def main(data: Path, runs: Path, file: Path | None = None) -> None:
    """Train with several learning rates of the classifier. Rerun the command to resume.

    Args:
        data: ten classes of Tiny-ImageNet, with train and val by class.
        runs: folder of the training runs.
        file: results file; by default that of this machine in results/.
    """
    record = new_record("classifier_rate", ("functional", "nn", "models", "data", "training"))
    record |= {"network": NETWORK, "rows": []}
    file = file or record_file(record)
    record = resumed(record, file)
    rows = record["rows"]
    folder = folder_of_splits(data, runs)
    for seed in SEEDS:
        for sweep, factors in SWEEPS.items():
            for factor in factors:
                key = (*sweep, factor, seed)
                if key not in map(key_of, rows):
                    rows.append(run(folder, runs, key))
                    write_record(file, record, table(rows))
