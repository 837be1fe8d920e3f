"""Run folders as training writes them, with seeded random predictions."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from covpool.data.image_set import ENCODING, ERRORS, ImageSet

METRICS = (
    "epoch,step,train_loss,train_top1,lr,images_per_second,seconds,loss,top1,top5,macro_f1,balanced_accuracy"
)
RECIPE = """\
data:
  path: sparrows
model:
  backbone: resnet18
  pool: {pool}
optimizer:
  lr: 0.1
out: {out}
"""


def labelled(images: ImageSet) -> list[tuple[str, int]]:
    """Return the name and class of every image."""
    return [(images.name(i), int(images.labels[i])) for i in range(len(images))]


def invented(classes: int, each: int) -> list[tuple[str, int]]:
    """Return names and classes of images that do not exist."""
    return [(f"{c}/{i}.jpg", c) for c in range(classes) for i in range(each)]


def write_run(
    folder: Path,
    classes: Sequence[str],
    images: Sequence[tuple[str, int]],
    *,
    accuracy: float = 0.8,
    epochs: int = 12,
    split: str | None = "test",
    validation: bool = True,
    seed: int = 0,
    pool: str = "isqrt_cov",
) -> Path:
    """Write a run folder. Predictions are correct at the rate ``accuracy``, else mostly the next class."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    steps = 40
    right = _write_predictions(folder, classes, images, accuracy, random) if split else math.nan
    _write_epochs(folder, epochs, steps, validation, right if split else 0.5)
    _write_log(folder, epochs, steps, random)
    (folder / "recipe.yaml").write_text(RECIPE.format(pool=pool, out=folder.name), encoding="utf-8")
    metrics = {
        "loss": 0.71,
        "top1": right,
        "top5": 0.97,
        "macro_f1": right - 0.01,
        "balanced_accuracy": right,
    }
    summary: dict[str, Any] = {
        "split": split,
        "metrics": {**metrics, "images": len(images)} if split else None,
        "validation": {"top1": 0.8} if validation else None,
        "best_epoch": epochs - epochs // 4,
        "epochs": epochs,
        "steps": epochs * steps,
        "seconds": 812.4,
        "parameters": 11_344_117,
        "images": {"train": 560, "val": 69, "test": len(images)},
        "classes": list(classes),
        "model": "resnet18",
        "pool": pool,
        "dim": 256,
        "image_size": 224,
        "bad_images": 2,
        "skipped_steps": 0,
        "processes": 2,
        "seed": seed,
        "source": {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": False},
        "versions": {"covpool": "0.1.0", "torch": "2.13.0", "python": "3.11.9"},
        "machine": "Some CPU, 2 cores",
    }
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


def _write_predictions(
    folder: Path,
    classes: Sequence[str],
    images: Sequence[tuple[str, int]],
    accuracy: float,
    random: np.random.Generator,
) -> float:
    right = 0
    with (folder / "predictions.csv").open("w", encoding=ENCODING, errors=ERRORS, newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("name", "label", "predicted", "confidence", "label_confidence", "loss"))
        for name, label in images:
            # Some classes are harder than others.
            is_right = random.random() < min(1.0, accuracy + 0.2 * math.sin(label))
            step = random.choice([1, 1, 1, 2, 5])
            predicted = label if is_right else (label + int(step)) % len(classes)
            confidence = random.uniform(0.4, 1)
            of_label = confidence if predicted == label else random.uniform(0, 1 - confidence)
            row = (confidence, of_label, -math.log(max(of_label, 1e-9)))
            writer.writerow((name, classes[label], classes[predicted], *(f"{value:.6f}" for value in row)))
            right += predicted == label
    return right / len(images)


def _write_epochs(folder: Path, epochs: int, steps: int, validation: bool, top1: float) -> None:
    lines = [METRICS]
    for epoch in range(epochs):
        done = (epoch + 1) / epochs
        train = (2.5 * math.exp(-3 * done) + 0.2, top1 + 0.05 - 0.5 * math.exp(-4 * done), _rate(done))
        known = (2.2 * math.exp(-2 * done) + 0.5, top1 - 0.4 * math.exp(-4 * done), 0.97, 0.7, 0.7)
        rest = ",".join(f"{value:.5f}" for value in known) if validation else ",,,,"
        figures = ",".join(f"{value:.6f}" for value in train)
        lines.append(f"{epoch + 1},{(epoch + 1) * steps},{figures},210.5,60.1,{rest}")
    (folder / "metrics.csv").write_text("\n".join([*lines, ""]), encoding="utf-8")


def _write_log(folder: Path, epochs: int, steps: int, random: np.random.Generator) -> None:
    with (folder / "log.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, epochs * steps + 1):
            done = step / (epochs * steps)
            loss = 2.5 * math.exp(-3 * done) + 0.2 + random.normal(0, 0.12)
            entry = {"step": step, "epoch": (step - 1) // steps + 1, "loss": loss, "lr": _rate(done)}
            file.write(json.dumps(entry) + "\n")
        file.write(json.dumps({"event": "resumed", "step": 17}) + "\n")


def _rate(done: float) -> float:
    return 0.05 * (1 + math.cos(math.pi * done)) + 1e-5
