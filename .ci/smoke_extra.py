"""Smoke test of the installed wheel with one of its small extras alone: .ci/smoke_extra.py EXTRA."""

import json
import os
import random
import sys
import tempfile
from pathlib import Path

import covpool

location = Path(covpool.__file__)
assert location.is_relative_to(sys.prefix), f"covpool was imported from {location}, not from the wheel"


def run(*words: str) -> None:
    """Run a command as from a shell."""
    from covpool.cli.main import main

    assert main(words) == 0, words


def paint() -> None:
    """Write images of two colors to the folder ``images``."""
    from PIL import Image

    chance = random.Random(0)
    for name, colour in (("red", (200, 30, 30)), ("blue", (30, 30, 200))):
        folder = Path("images", "test", name)
        folder.mkdir(parents=True)
        for i in range(4):
            shade = tuple(channel + chance.randrange(50) for channel in colour)
            Image.new("RGB", (40, 40), shade).save(folder / f"{i}.png")


def save_bundle() -> None:
    """Save an untrained network in the folder ``bundle``."""
    model = covpool.create_model("test_resnet", dim=8, num_classes=2, image_size=32)
    covpool.save_model(model, "bundle", classes=["blue", "red"])


def data() -> None:
    """Check images, and write them as shards."""
    paint()
    run("check", "images", "--out", "findings.csv")
    run("shard", "images", "--out", "shards")
    assert list(Path("shards").rglob("*.tar")), "no shards were written"


def heif() -> None:
    """Decode a HEIF image, as phones write them."""
    import io

    import pillow_heif
    from PIL import Image

    from covpool.data.decode import decode

    stream = io.BytesIO()
    pillow_heif.from_pillow(Image.new("RGB", (64, 48), (200, 30, 30))).save(stream)
    assert decode(stream.getvalue()).size == (64, 48)


def hub() -> None:
    """Write a model card, and check the error for a model that is not in the cache."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported
    from covpool.errors import HubError
    from covpool.hub import HubAddress
    from covpool.models.card import CARD
    from covpool.models.push import readme

    save_bundle()
    assert "library_name: covpool" in readme(covpool.models.read_card("bundle"), HubAddress.of("ann/birds"))
    message = ""
    try:
        covpool.load_model("hf-hub:ann/birds")
    except HubError as error:
        message = str(error)
    assert f"{CARD} is not in the cache" in message, message


def faiss() -> None:
    """Search with faiss."""
    paint()
    save_bundle()
    run("retrieve", "bundle", "images", "--engine", "faiss", "--workers", "0", "--at", "[1]")
    assert json.loads(Path("runs/retrieval/results.json").read_bytes())["arguments"]["engine"] == "faiss"


def scale() -> None:
    """Predict with Ray."""
    paint()
    save_bundle()
    run("predict", "bundle", "images", "--engine", "ray", "--format", "csv")
    files = Path("runs/predictions").glob("*.csv")
    lines = [line for file in files for line in file.read_text().splitlines()[1:]]
    assert len(lines) == 8, lines


def mlflow() -> None:
    """Log a metric to a database on disk. The tracker of covpool needs the extra ``train`` too."""
    import mlflow

    mlflow.set_tracking_uri("sqlite:///store.db")
    with mlflow.start_run():
        mlflow.log_metrics({"top1": 0.5}, step=1)
    (run,) = mlflow.search_runs(output_format="list")
    assert run.data.metrics == {"top1": 0.5}, run


def wandb() -> None:
    """Log a metric offline, to a file. The tracker of covpool needs the extra ``train`` too."""
    import wandb

    run = wandb.init(project="covpool", mode="offline")
    run.log({"top1": 0.5}, step=1)
    run.finish()
    assert list(Path("wandb").glob("offline-run-*/*.wandb")), "nothing was kept"


SMOKES = {smoke.__name__: smoke for smoke in (data, faiss, heif, hub, mlflow, scale, wandb)}

if __name__ == "__main__":  # Ray starts processes that import this file
    extra = sys.argv[1]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.chdir(folder)
        SMOKES[extra]()
    print(f"covpool {covpool.__version__} with its extra {extra}: the wheel works")
