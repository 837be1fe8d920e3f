"""Compare heads in closed form with average pooling and with trained heads, on frozen backbones.

    python -m lab one_pass SETS RUNS

SETS has the folders ``sparrows``, ``cub``, ``cars`` and ``flowers``, each with train and test by class. Every
row is one call of ``covpool.fit``: one pass of the frozen backbone, then every head is solved from the same
images. The number of channels of ``isqrt_cov`` is chosen on held-out training images. Rerun the command to
resume, also in the middle of a row. The accuracy of trained heads is that of ``python -m lab arena``, which
has the same backbone, images and preprocessing, and trains with flips.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import covpool
from covpool.closed_form.options import FitOptions
from covpool.data.sources import open_splits
from covpool.evaluate.probe.record import difference, paired_difference
from covpool.terminal import NamedProgress
from covpool.training.report.record import read_predictions
from lab.experiments.arena import DIGITS
from lab.experiments.fine_grained import TITLES
from lab.experiments.resnet50 import RESNET50
from lab.record import (
    ROOT,
    committed_file,
    new_record,
    read_record,
    resumable_file,
    resumed,
    with_block,
    write_record,
)

NAME = "one_pass"
LITE0 = "tf_efficientnet_lite0"
DIMS = (64, 128, 192, 256)
COVARIANCE = {f"isqrt_cov@dim={dim}": dim for dim in DIMS}
HEADS = ("gap", *COVARIANCE)
BACKBONES = {"lite0": (LITE0, "EfficientNet-Lite0"), "resnet50": (RESNET50, "ResNet-50")}


class Row(NamedTuple):
    """A data set with a backbone at an image size."""

    data: str
    backbone: str
    size: int

    @property
    def name(self) -> str:
        """Its name on the command line, and in the results of arena."""
        return f"{self.data}-{self.backbone}-{self.size}"

    @property
    def title(self) -> str:
        """The data set, the backbone and the image size in words."""
        return f"{TITLES[self.data].partition(',')[0]}, {BACKBONES[self.backbone][1]}, {self.size} pixels"


ROWS = (
    Row("sparrows", "lite0", 224),
    Row("sparrows", "resnet50", 224),
    Row("flowers", "lite0", 224),
    Row("cub", "lite0", 224),
    Row("cars", "lite0", 224),
    Row("cub", "lite0", 448),
    Row("cars", "lite0", 448),
    Row("cub", "resnet50", 224),
)


def measured(
    row: Row, sets: Path, folder: Path, weights: Path | None, heads: tuple[str, ...] = HEADS
) -> dict[str, Any]:
    """Fit all heads of a row, and return their accuracies, and which test images they classify correctly."""
    data = sets / row.data
    options = FitOptions(
        model=BACKBONES[row.backbone][0],
        weights=None if row.backbone == "lite0" else str(weights),
        image_size=row.size,
        heads=heads,
        compile=row.data != "sparrows",
    )
    started = time.monotonic()
    with NamedProgress() as progress:
        record = covpool.fit(data, folder, options, log=progress.log, progress=progress).metrics
    classes = tuple(open_splits(str(data))["train"].classes)
    accuracies = {}
    for head in record["heads"]:
        right = read_predictions(folder / "predictions" / f"{head['head']}.csv", classes).right
        digits = "".join("01"[int(one)] for one in right)
        accuracies[head["head"]] = {key: head[key] for key in ("solver", "strength", "held_out", "top1")} | {
            "right": digits
        }
    origin = {key: record[key] for key in ("date", "source", "versions", "machine", "images")}
    return {**origin, "heads": accuracies, "seconds": round(time.monotonic() - started, 1)}


def summary(row: Row, held: Mapping[str, Any], trained: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a row of the table; ``trained`` has the trained heads of its case."""
    heads = held["heads"]
    best = max(COVARIANCE, key=lambda head: heads[head]["held_out"])
    ours, gap = (right_shares(heads[head]["right"]) for head in (best, "gap"))
    found = {
        "title": row.title,
        "gap": heads["gap"]["top1"],
        "gap_solver": heads["gap"]["solver"],
        "best": best,
        "dim": COVARIANCE[best],
        "isqrt_cov": heads[best]["top1"],
        "by_dim": {dim: heads[head]["top1"] for head, dim in COVARIANCE.items()},
        "over_gap": paired_difference(ours, gap),
        "trained": None,
        "over_trained": None,
        "trained_gap": trained["gap"]["test"]["top1"]["mean"] if "gap" in trained else None,
    }
    if "isqrt_cov" in trained:
        rival = trained["isqrt_cov"]
        shares = right_shares(rival["right"]) / rival["seeds"]
        if len(shares) == len(ours):
            found["trained"] = rival["test"]["top1"]["mean"]
            found["over_trained"] = paired_difference(ours, shares)
    return found


def right_shares(digits: str) -> np.ndarray:
    """Return for each image the number of seeds that are right, from the digits of a result."""
    return np.array([DIGITS.index(digit) for digit in digits], dtype=float)


def trained_heads() -> dict[str, dict[str, Any]]:
    """Return the trained heads by case, from the results of arena."""
    cases = read_record(committed_file("arena"))["cases"]
    return {one["case"]: {head["head"]: head for head in one["heads"]} for one in cases}


def committed_summaries() -> dict[str, dict[str, Any]]:
    """Return the numbers of the committed rows by name."""
    summaries: dict[str, dict[str, Any]] = read_record(committed_file(NAME), NAME)["summary"]
    return summaries


def table(summaries: Mapping[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = [
        "Top-1 accuracy in percent of heads on a frozen backbone, on the test images without flips. "
        "Held-out training images decide between ridge and logistic regression for each head, and between "
        "values of d for `isqrt_cov` (the bold one). Trained heads are those of `python -m lab arena`: "
        "d = 128, trained with flips, mean over their seeds. Differences are paired by image, with 95 % "
        "intervals.",
        "",
        f"| images and backbone | `gap` | {' | '.join(f'd = {dim}' for dim in DIMS)} | chosen d "
        "| over `gap` | trained `gap` | trained `isqrt_cov` | over trained `isqrt_cov` |",
        "|---" * (len(DIMS) + 7) + "|",
    ]
    for row in (row for row in ROWS if row.name in summaries):
        one = summaries[row.name]
        dims = [
            f"**{100 * top1:.1f}**" if int(dim) == one["dim"] else f"{100 * top1:.1f}"
            for dim, top1 in one["by_dim"].items()
        ]
        trained = [
            "not run" if one[key] is None else f"{100 * one[key]:.1f}" for key in ("trained_gap", "trained")
        ]
        cells = [one["title"], f"{100 * one['gap']:.1f}", *dims, str(one["dim"])]
        cells += [difference(one["over_gap"]), *trained, difference(one["over_trained"])]
        lines.append(f"| {' | '.join(cells)} |")
    missing = [row.title for row in ROWS if row.name not in summaries]
    return "\n".join([*lines, *(["", f"Not run: {'; '.join(missing)}."] if missing else [])])


def write_pages(page: Path = ROOT / "docs" / "closed_form.md") -> list[Path]:
    """Write the table of the committed results into the page.

    Args:
        page: Markdown page with marks.
    """
    block = table(committed_summaries())
    page.write_text(with_block(page.read_text(encoding="utf-8"), NAME, block), encoding="utf-8")
    return [page]


def main(sets: Path, runs: Path, rows: tuple[str, ...] = (), weights: Path | None = None) -> None:
    """Fit heads in closed form on frozen backbones, and write the results after each row.

    Args:
        sets: folder with sparrows, cub, cars and flowers, each with train and test by class.
        runs: folder of the fits; rerun the command to resume.
        rows: rows to run, as [cub-lite0-224]; all if not given.
        weights: file with the weights of ResNet-50, for its rows.
    """
    record = new_record(NAME, ("functional", "nn", "models", "data", "closed_form")) | {"rows": {}}
    file = resumable_file(record)
    held = resumed(record, file)
    record = record | {"rows": held["rows"]}
    for row in ROWS:
        if row.name in record["rows"] or (rows and row.name not in rows):
            continue
        if row.backbone == "resnet50" and weights is None:
            print(f"{row.name} needs --weights")
            continue
        record["rows"][row.name] = json.loads(json.dumps(measured(row, sets, runs / row.name, weights)))
        trained = trained_heads()
        record["summary"] = {
            one.name: summary(one, record["rows"][one.name], trained.get(one.name, {}))
            for one in ROWS
            if one.name in record["rows"]
        }
        write_record(file, record, table(record["summary"]))
        print(f"{row.name} is done", flush=True)
