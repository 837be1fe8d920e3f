"""Smoke test of the installed wheel with its extra `eval`: every command after training.

All commands run in one process, which imports torch once. The smoke test of training runs the script.
"""

import csv
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet
import timm
import torch
from PIL import Image

import covpool
from covpool.cli.main import main

location = Path(covpool.__file__)
assert location.is_relative_to(sys.prefix), f"covpool was imported from {location}, not from the wheel"

CLASSES = {"blue": (30, 30, 200), "red": (200, 30, 30)}
IN_A_CLASS = 8


def paint(folder: Path) -> None:
    """Write training and test images of two colors."""
    chance = random.Random(0)
    for place in (folder / split / name for split in ("train", "test") for name in CLASSES):
        place.mkdir(parents=True)
        for i in range(IN_A_CLASS):
            shade = tuple(channel + chance.randrange(50) for channel in CLASSES[place.name])
            Image.new("RGB", (40, 40), shade).save(place / f"{i}.png")


def run(*words: str) -> None:
    """Run a command as from a shell."""
    print(f"$ covpool {' '.join(words)}", flush=True)
    assert main(words) == 0, words[0]


def results(folder: str) -> dict[str, Any]:
    """Read the results of a command."""
    return json.loads(Path(folder, "results.json").read_bytes())


def rows(file: str) -> list[dict[str, str]]:
    """Read the rows of a CSV file."""
    with open(file, newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


with tempfile.TemporaryDirectory() as name:
    os.chdir(name)
    torch.manual_seed(0)
    paint(Path("images"))
    torch.save(timm.create_model("test_resnet", num_classes=0).state_dict(), "weights.pth")
    of_test = len(CLASSES) * IN_A_CLASS
    small = ["--image-size", "32", "--dim", "8", "--heads", "gap,isqrt_cov", "--seeds", "1", "--epochs", "2"]
    run("probe", "images", "--model", "test_resnet", "--weights", "weights.pth", *small, "--svm-seeds", "1")
    probed = results("runs/probe")
    assert [row["head"] for row in probed["rows"]] == ["gap", "isqrt_cov"], probed["rows"]
    assert all("svm" in row for row in probed["rows"]), probed["rows"]
    assert covpool.load_model("runs/probe/bundle").classes == tuple(CLASSES)

    # SVMs on average-pooled features, which separate the colors with any weights.
    run("svm", "runs/probe/heads/gap", "images", "--out", "bundle")
    assert covpool.load_model("bundle").classes == tuple(CLASSES)

    run("eval", "bundle", "images", "--workers", "0")
    evaluated = results("runs/evaluation")
    assert evaluated["metrics"]["top1"] == 1, evaluated["metrics"]
    assert len(rows("runs/evaluation/predictions.csv")) == of_test
    assert [row["class"] for row in rows("runs/evaluation/per_class.csv")] == list(CLASSES)
    for figure in ("confusion", "per_class", "reliability"):
        assert Image.open(f"runs/evaluation/{figure}.png").width > 300, figure

    run("predict", "bundle", "images/test", "--format", "csv", "--workers", "0")
    predicted = rows("runs/predictions/0000000.csv")
    assert len(predicted) == of_test, predicted
    assert all(row["id"].startswith(row["label1"]) and not row["error"] for row in predicted), predicted

    run("embed", "bundle", "images/test", "--workers", "0")
    embedded = pyarrow.parquet.read_table("runs/embeddings/0000000.parquet").to_pylist()
    assert [row["id"] for row in embedded] == [row["id"] for row in predicted], embedded
    assert {len(row["vector"]) for row in embedded} == {covpool.load_model("bundle").head_hidden_size}

    run("retrieve", "bundle", "images", "--workers", "0")
    retrieved = results("runs/retrieval")
    assert retrieved["metrics"]["recall"]["1"] == 1, retrieved["metrics"]
    assert len(rows("runs/retrieval/queries.csv")) == of_test
    assert Image.open("runs/retrieval/neighbours.png").width > 300

print(f"covpool {covpool.__version__} with its extra eval: the wheel works")
