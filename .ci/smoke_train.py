"""Smoke test of the installed wheel with its extra `train`: one command from images to a report."""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

import covpool

location = Path(covpool.__file__)
assert location.is_relative_to(sys.prefix), f"covpool was imported from {location}, not from the wheel"

with tempfile.TemporaryDirectory() as folder:
    chance = random.Random(0)
    for name, colour in (("red", (200, 30, 30)), ("blue", (30, 30, 200))):
        (Path(folder) / "images" / name).mkdir(parents=True)
        for i in range(20):
            shade = tuple(channel + chance.randrange(50) for channel in colour)
            Image.new("RGB", (40, 40), shade).save(Path(folder) / "images" / name / f"{i}.png")
    small = [
        "--model",
        "test_resnet",
        "--dim",
        "8",
        "--image-size",
        "32",
        "--epochs",
        "2",
        "--batch-size",
        "8",
    ]
    small += ["--val-fraction", "0.2", "--workers", "1"]
    command = [Path(sys.executable).with_name("covpool"), "train", "--data", Path(folder) / "images"]
    subprocess.run([*command, *small, "--out", Path(folder) / "run"], check=True, timeout=300)
    summary = json.loads((Path(folder) / "run" / "summary.json").read_bytes())
    assert summary["images"] == {"train": 32, "val": 8}, summary["images"]
    assert "<img" in (Path(folder) / "run" / "report.html").read_text("utf-8")
    assert covpool.load_model(Path(folder) / "run" / "bundle").classes == ("blue", "red")

print(f"covpool {covpool.__version__} with its extra train: the wheel works")
