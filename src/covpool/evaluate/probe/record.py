"""The results of probing on disk: the arguments, a row per head and seed, and a summary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from covpool.arguments import check_same
from covpool.data.image_set import ImageSet
from covpool.errors import UsageError
from covpool.evaluate.probe.options import AVERAGE
from covpool.evaluate.results import FILE, write_results
from covpool.models.card import plain_json
from covpool.provenance import new_results
from covpool.storage.files import MAX_WEIGHTS_BYTES, read_file, read_json, replace_file, write_file
from covpool.storage.folders import make_folder, replace_folder
from covpool.training.metrics import Predictions
from covpool.training.report.record import read_predictions
from covpool.training.run_folder import write_predictions

PROTOCOL = "probe"
PACKAGES = ("functional", "nn", "models", "data", "inference", "training", "evaluate")
# Arguments that may differ when a run is resumed.
FREE = ("seeds", "heads", "workers", "extract_batch", "compile")


class ProbeFolder:
    """The results folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def head(self, name: str) -> Path:
        """Return the folder of a head's bundle, trained with the first seed."""
        return self.path / "heads" / name

    def check(self, arguments: dict[str, Any]) -> None:
        """Raise if the folder holds results with other arguments. Called before anything is computed."""
        given, earlier = plain_json("arguments", arguments), self._earlier()
        before = earlier["arguments"] if earlier else given
        check_same(self.path, {name: given[name] for name in given if name not in FREE}, before)

    def earlier(self, features: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
        """Return the earlier rows, and the trials of earlier tuning.

        Raises:
            ValueError: if the rows used other features, that is, other images or weights.
        """
        earlier = self._earlier()
        if earlier and earlier["features"] != features:
            raise UsageError(f"{self.path} has results of other images or weights: use another --out")
        return {name: list(earlier.get(name, [])) for name in ("rows", "trials")}

    def _earlier(self) -> dict[str, Any]:
        file = self.path / FILE
        record: dict[str, Any] = read_json(file) if file.exists() else {}
        # Results without rows do not fix the arguments.
        return record if record.get("rows") or record.get("trials") else {}

    def write(self, record: dict[str, Any]) -> None:
        """Write the results and the Markdown table, each atomically."""
        write_results(self.path, record)
        replace_file(self.path / "table.md", f"{table(record)}\n".encode())

    def predictions(self, head: str, seed: int) -> Path:
        """Return the path of the predictions CSV of a head and seed."""
        return self.path / "predictions" / f"{head}-{seed}.csv"

    def write_predictions(self, head: str, seed: int, predictions: Predictions, images: ImageSet) -> None:
        """Write the predictions of a head for the images that compare it with the others."""
        file = self.predictions(head, seed)
        make_folder(file.parent)
        write_predictions(file, predictions, images)

    def add_differences(self, heads: list[dict[str, Any]], classes: tuple[str, ...]) -> None:
        """Add to each head its accuracy minus that of average pooling, paired by image.

        The 95 % interval is over images; each image counts with its mean over seeds.
        """
        seeds = {summary["head"]: summary["seeds"] for summary in heads}
        for summary in heads:
            summary["over_gap"] = None
            if summary["head"] == AVERAGE or AVERAGE not in seeds:
                continue
            common = range(min(seeds[summary["head"]], seeds[AVERAGE]))
            ours, theirs = (
                [self.predictions(head, k) for k in common] for head in (summary["head"], AVERAGE)
            )
            if all(file.exists() for file in (*ours, *theirs)):  # none with val and without test
                summary["over_gap"] = paired_difference(
                    mean_right(ours, classes), mean_right(theirs, classes)
                )

    def keep_best(self, head: str) -> None:
        """Copy the bundle of the best head to ``bundle``."""
        copy_bundle(self.head(head), self.path / "bundle")


def mean_right(files: Sequence[Path], classes: tuple[str, ...]) -> np.ndarray:
    """Return for each image the share of seeds that classify it right; each file is a seed's predictions."""
    return np.mean([read_predictions(file, classes).right for file in files], axis=0)  # type: ignore[no-any-return]


def paired_difference(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    """Return the difference of two heads in accuracy, with a 95 % interval over images.

    Args:
        ours: share of seeds that classify each image right, for a head.
        theirs: the same for the other head.
    """
    per_image = ours - theirs
    middle, half = float(per_image.mean()), 1.96 * float(per_image.std()) / len(per_image) ** 0.5
    return {"mean": middle, "low": middle - half, "high": middle + half}


def copy_bundle(source: Path, target: Path) -> None:
    """Copy a bundle, atomically."""
    with replace_folder(target) as new:
        for file in source.iterdir():
            write_file(new / file.name, read_file(file, MAX_WEIGHTS_BYTES))


def new_record(arguments: dict[str, Any], images: dict[str, int], device: str) -> dict[str, Any]:
    """Return the first fields of the results: code version, machine and arguments. Rows have their seeds."""
    head = new_results(PACKAGES, arguments, device, seed=None)
    return {
        "protocol": PROTOCOL,
        **head,
        "images": images,
        "rows": [],
        "trials": [],
        "heads": [],
        "best": None,
    }


def summarized(record: dict[str, Any]) -> dict[str, Any]:
    """Return means and deviations over seeds, and the best head on the validation images."""
    heads = [_summary(name, record) for name in dict.fromkeys(row["head"] for row in record["rows"])]
    judged = [head for head in heads if head["val"] is not None]
    best = max(judged, key=lambda head: head["val"]["top1_flip"]["mean"])["head"] if judged else None
    return {"heads": heads, "best": best}


def table(record: dict[str, Any]) -> str:
    """Return the table as Markdown."""
    titles, *rows = table_cells(record)
    first, *others = (f"| {' | '.join(cells)} |" for cells in (titles, *rows))
    return "\n".join([first, "|---" * len(titles) + "|", *others])


def table_cells(record: dict[str, Any]) -> list[list[str]]:
    """Return the titles and a row per head: percent, mean ± standard deviation over seeds."""
    heads = record["heads"] or summarized(record)["heads"]
    columns = [name for name in ("val", "test", "svm") if any(head[name] for head in heads)]
    titles = {"val": chosen_on(record["images"]), "test": "test", "svm": "SVM, test"}
    named = [f"{titles[name]}{flip}" for name in columns for flip in ("", ", flip")]
    over = ["over gap"] if any(head.get("over_gap") for head in heads) else []
    # The chosen settings and the cost of each head, next to its accuracy.
    tuned = ["lr", "dropout", "parameters", "vector"] if record.get("trials") else []
    rows = [["head", "seeds", *named, *over, *tuned, "seconds"]]
    for head in heads:
        cells = [percent(head[name], key) for name in columns for key in ("top1", "top1_flip")]
        cells += [difference(head.get("over_gap")) for _ in over]
        if tuned:
            cells += [f"{head['lr']:g}", f"{head['drop_rate']:g}"]
            cells += [f"{head['parameters']:,}", f"{head['vector']:,}"]
        rows.append([head["head"], str(head["seeds"]), *cells, f"{head['seconds']:.0f}"])
    return rows


def chosen_on(images: dict[str, int]) -> str:
    """Return the title of the accuracies by which the best head is chosen."""
    return "val" if "val" in images else "set aside" if "test" in images else "cross-validated"


def difference(over: dict[str, float] | None) -> str:
    """Format a difference in percentage points, with its interval.

    Example:
        >>> difference({"mean": 0.0447, "low": 0.019, "high": 0.0704})
        '+4.5 (+1.9 to +7.0)'
    """
    if over is None:
        return ""
    # z and the replacement avoid "-0.0" and "+0.0".
    points = (f"{100 * over[name]:+z.1f}" for name in ("mean", "low", "high"))
    middle, low, high = ("0.0" if text == "+0.0" else text for text in points)
    return f"{middle} ({low} to {high})"


def percent(measured: dict[str, Any] | None, key: str) -> str:
    """Format a table cell: mean ± standard deviation, empty if nothing was measured.

    Example:
        >>> percent({"top1": {"mean": 0.7061, "sd": 0.0083}}, "top1")
        '70.6 ± 0.8'
    """
    if measured is None:
        return ""
    spread = measured[key]
    deviation = "" if spread["sd"] is None else f" ± {100 * spread['sd']:.1f}"
    return f"{100 * spread['mean']:.1f}{deviation}"


def _summary(name: str, record: dict[str, Any]) -> dict[str, Any]:
    rows = [row for row in record["rows"] if row["head"] == name]
    summary: dict[str, Any] = {"head": name, "seeds": len(rows)}
    for part in ("val", "test", "svm"):
        measured = [row[part] for row in rows if row.get(part) is not None]
        summary[part] = (
            {key: _spread([values[key] for values in measured]) for key in ("top1", "top1_flip")}
            if measured
            else None
        )
    summary["seconds"] = mean(row["seconds"] for row in rows)
    summary |= {name: rows[0][name] for name in ("parameters", "vector", "lr", "drop_rate")}
    return summary


def _spread(values: list[float]) -> dict[str, float | None]:
    return {"mean": mean(values), "sd": stdev(values) if len(values) > 1 else None}
