"""What ``summary.json`` says of a run, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covpool.train.report.page import duration, number, percent

SPLITS = {"train": "training", "val": "validation", "test": "test"}
# Keys of the metrics, and their names.
METRICS = {
    "top1": "Top-1",
    "top5": "Top-5",
    "macro_f1": "Macro F1",
    "balanced_accuracy": "Balanced accuracy",
    "loss": "Loss",
}
Fact = tuple[str, str]


def run_title(summary: Mapping[str, Any]) -> str:
    """The network and its pooling."""
    return f"{summary.get('model', 'model')} · {summary.get('pool', 'pooling')}"


def metrics(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of the reported split by their keys; five guesses of five classes say nothing."""
    known: Mapping[str, Any] = summary.get("metrics") or {}
    return {
        key: known.get(key)
        for key in METRICS
        if key in known and (key, len(summary["classes"]) > 5) != ("top5", False)
    }


def metric_text(key: str, value: float | None) -> str:
    """A metric for people."""
    return number(value, 3) if key == "loss" else percent(value)


def facts(summary: Mapping[str, Any]) -> list[Fact]:
    """What was trained, on what, and for how long."""
    images: Mapping[str, int] = summary.get("images") or {}
    size = summary.get("image_size")
    found = [
        ("Network", str(summary.get("model", ""))),
        ("Pooling", _pooling(summary)),
        ("Parameters", number(summary.get("parameters"))),
        ("Image size", f"{size} px" if size else ""),
        ("Classes", number(len(summary["classes"]))),
        ("Images", ", ".join(f"{SPLITS.get(split, split)} {number(n)}" for split, n in images.items())),
        ("Epochs", _epochs(summary)),
        ("Steps", number(summary.get("steps"))),
        ("Time in training", duration(summary.get("seconds"))),
    ]
    if summary.get("bad_images"):
        found.append(("Unusable images", f"{number(summary['bad_images'])} (bad_images.csv)"))
    if summary.get("skipped_steps"):
        found.append(("Skipped steps", f"{number(summary['skipped_steps'])} (log.jsonl)"))
    return [fact for fact in found if fact[1]]


def environment(summary: Mapping[str, Any]) -> list[Fact]:
    """What is needed to get the same again."""
    versions: Mapping[str, Any] = summary.get("versions") or {}
    found = [
        ("Machine", str(summary.get("machine") or "")),
        ("Processes", number(summary.get("processes"))),
        ("Seed", str(summary.get("seed", ""))),
        ("Commit", _commit(summary)),
        *((name, str(version)) for name, version in versions.items()),
    ]
    return [fact for fact in found if fact[1]]


def _pooling(summary: Mapping[str, Any]) -> str:
    pool, dim = summary.get("pool"), summary.get("dim")
    return f"{pool}, {dim} channels" if pool and dim else str(pool or "")


def _epochs(summary: Mapping[str, Any]) -> str:
    epochs = number(summary.get("epochs"))
    if summary.get("validation") is None or summary.get("best_epoch") is None:
        return epochs
    return f"{epochs}, the best is {summary['best_epoch']}"


def _commit(summary: Mapping[str, Any]) -> str:
    source: Mapping[str, Any] = summary.get("source") or {}
    changed = ", with changes" if source.get("dirty") else ""
    return f"{source['commit'][:12]}{changed}" if source.get("commit") else ""
