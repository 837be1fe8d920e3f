"""A new source is one module and one entry in the list; then every command uses it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import timm
import torch

from covpool.data import SOURCES, sources
from covpool.data.check import check
from covpool.data.sources import layout_of, open_splits, open_unlabeled
from covpool.evaluate.accuracy import measure_accuracy
from covpool.evaluate.probe import ProbeOptions, probe
from covpool.inference import Predict, Running, infer
from covpool.models import create_model, save_model
from covpool.training.recipe_files import read_recipe
from covpool.training.run import train_recipe
from tests.inference.small import rows_of

COUNT = 36


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sources, "SOURCES", {"npy": "tests.data.npy_source", **SOURCES})
    chance = np.random.default_rng(0)
    labels = np.arange(COUNT) // 3 % 2
    pixels = chance.integers(0, 100, (COUNT, 40, 40, 3)) + 120 * labels[:, None, None, None]
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data/images.npy", pixels.astype(np.uint8))
    np.save(tmp_path / "data/labels.npy", labels)
    return tmp_path / "data"


def test_open_check_and_predict(data: Path, tmp_path: Path) -> None:
    assert layout_of(data) == "npy"
    assert {split: len(images) for split, images in open_splits(data).items()} == {"train": 24, "test": 12}
    assert len(open_unlabeled(data)) == COUNT
    assert not check(data).problems
    torch.manual_seed(0)
    model = create_model("test_resnet", dim=8, num_classes=2, image_size=64)
    bundle = save_model(model, tmp_path / "bundle", classes=["dark", "light"])
    infer(bundle, data, tmp_path / "rows", Predict(), running=Running(workers=0, device="cpu"))
    assert [row["id"] for row in rows_of(tmp_path / "rows")] == [f"all/{i}" for i in range(COUNT)]


@pytest.mark.slow
def test_train_eval_and_probe(data: Path, tmp_path: Path) -> None:
    changes = {
        "data.path": str(data),
        "data.workers": 0,
        "model.backbone": "test_resnet",
        "model.dim": 8,
        "model.image_size": 64,
        "batch_size": 8,
        "schedule.epochs": 1,
        "trackers": [],
        "out": str(tmp_path / "run"),
    }
    train_recipe(read_recipe(None, changes))
    evaluated = measure_accuracy(
        tmp_path / "run/bundle", data, tmp_path / "evaluation", workers=0, device="cpu"
    )
    assert len(evaluated.images) == 12
    torch.save(timm.create_model("test_efficientnet", num_classes=0).state_dict(), tmp_path / "weights.pth")
    options = ProbeOptions(
        "test_efficientnet",
        weights=str(tmp_path / "weights.pth"),
        dim=8,
        seeds=1,
        epochs=1,
        workers=0,
        image_size=64,
    )
    probed = probe(data, options, out=tmp_path / "probe", cache=tmp_path / "cache")
    assert {row["head"] for row in probed.record["rows"]} == {"gap", "isqrt_cov", "isqrt_cov+gap"}
