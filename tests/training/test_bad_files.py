"""An unusable image costs one sample, and no untrusted file runs code."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from covpool.cli.main import main
from covpool.training.recipe_files import read_recipe
from tests.data.pictures import TINY10, encode, needs_tiny10
from tests.training.small import rows, train


def bad_files() -> dict[str, bytes]:
    """Return every kind of unusable image, by file name."""
    good = encode(
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)), "JPEG"
    )
    bomb = bytearray(encode(Image.new("L", (16, 16)), "PNG"))
    bomb[16:24] = (60_000).to_bytes(4, "big") * 2
    return {
        "empty.jpg": b"",
        "truncated.jpg": good[: len(good) // 2],
        "text.jpg": b"this is no image",
        "bomb.png": bytes(bomb),
        "postscript.jpg": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n",
        "line.png": encode(Image.new("RGB", (4000, 1)), "PNG"),
        "pickle.jpg": pickle.dumps(Bomb("ran")),
    }


class Bomb:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (self.path,)


@pytest.fixture
def flawed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write forty good training images and each unusable image once, in two classes."""
    monkeypatch.chdir(tmp_path)  # the pickle would make its folder here
    root = tmp_path / "flawed"
    for split, count in (("train", 20), ("val", 8)):
        for number, name in enumerate(sorted((TINY10 / "train").iterdir())[:2]):
            folder = root / split / f"class{number}"
            folder.mkdir(parents=True)
            for file in sorted(name.iterdir())[:count]:
                shutil.copy(file, folder)
    for name, data in bad_files().items():
        (root / "train" / "class0" / name).write_bytes(data)
    (root / "val" / "class1" / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    return root


@needs_tiny10
@pytest.mark.parametrize("layout", ["folder", pytest.param("shards", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("_no_report")
def test_bad_images_cost_one_sample_each_and_are_listed(flawed: Path, tmp_path: Path, layout: str) -> None:
    data = flawed
    if layout == "shards":
        data = tmp_path / "shards"
        assert main(["shard", str(flawed), "--out", str(data)]) == 0
    changes = {"data.path": str(data), "data.limit": None, "batch_size": 47, "schedule.epochs": 2}
    run = train(tmp_path / "run", changes)
    found = rows(run.folder / "bad_images.csv")
    assert {Path(row["name"]).name for row in found} == {*bad_files(), "broken.jpg"}
    assert all(row["reason"] and row["sentence"] for row in found)
    assert run.summary["bad_images"] == len(found) == 8
    assert run.summary["metrics"]["images"] == 16
    assert not (tmp_path / "ran").exists()


@needs_tiny10
@pytest.mark.usefixtures("_no_report")
def test_too_many_bad_images_stop_the_run(flawed: Path, tmp_path: Path) -> None:
    changes = {"data.path": str(flawed), "data.limit": None, "batch_size": 47, "data.max_bad": 3}
    with pytest.raises(ValueError, match=r"7 images are unreadable, more than --max-bad 3"):
        train(tmp_path / "run", changes)
    assert len((tmp_path / "run" / "bad_images.csv").read_text().splitlines()) == 8
    with pytest.raises(ValueError, match=r"7 images are unreadable, more than --max-bad 3"):
        train(tmp_path / "run", changes)  # rerunning does not help


@needs_tiny10
@pytest.mark.usefixtures("_no_report")
def test_files_of_strangers_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(pickle.dumps(Bomb("ran")))
    with pytest.raises(ValueError, match=r"weights\.safetensors"):
        train(tmp_path / "run", {"weights.path": str(weights)})
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("batch_size: !!python/object/apply:os.mkdir [ran]\n")
    with pytest.raises(ValueError, match="is not valid YAML"):
        read_recipe(recipe)
    with pytest.raises(yaml.YAMLError):  # the loader refuses the tag, whatever the value
        yaml.safe_load(recipe.read_text())
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "model.safetensors").write_bytes(pickle.dumps(Bomb("ran")))
    (bundle / "covpool.json").write_text("{}")
    with pytest.raises(ValueError, match="bundle"):
        train(tmp_path / "run", {"weights.bundle": str(bundle)})
    assert not (tmp_path / "ran").exists()


@needs_tiny10
@pytest.mark.usefixtures("_no_report")
def test_bad_images_of_the_test_count_too(tmp_path: Path) -> None:
    root = tmp_path / "images"
    for split in ("train", "test"):
        for name in sorted((TINY10 / "train").iterdir())[:2]:
            (root / split / name.name).mkdir(parents=True)
            for file in sorted(name.iterdir())[:12]:
                shutil.copy(file, root / split / name.name)
            (root / split / name.name / "bad.jpg").write_bytes(b"no image")
    changes = {"data.path": str(root), "data.limit": None, "validation.refit": True, "schedule.epochs": 1}
    run = train(tmp_path / "run", changes)
    found = {row["name"] for row in rows(run.folder / "bad_images.csv")}
    assert len([name for name in found if name.startswith("test/")]) == 2
    assert run.summary["bad_images"] == len(found)
