"""Whole networks by epoch: the folders, the choice of the rate, and a run on photographs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import timm
import torch

from lab.experiments import cub_epochs
from tests.data.pictures import SPARROWS, needs_sparrows


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """24 training photographs and three test photographs of three species."""
    for split, count in (("train", 24), ("test", 3)):
        for species in sorted((SPARROWS / split).iterdir())[:3]:
            (tmp_path / "cub" / split / species.name).mkdir(parents=True)
            for image in sorted(species.iterdir())[:count]:
                shutil.copy(image, tmp_path / "cub" / split / species.name)
    return tmp_path / "cub"


def names(folder: Path) -> set[str]:
    return {f"{file.parent.name}/{file.name}" for file in folder.glob("*/*")}


@needs_sparrows
def test_the_choice_of_the_rate_sees_no_test_image(images: Path, tmp_path: Path) -> None:
    trials = cub_epochs.folder_for_trials(images, tmp_path)
    train, held_out = names(trials / "train"), names(trials / "val")
    assert not train & held_out
    assert train | held_out == names(images / "train")
    assert len(held_out) == 24
    epochs = cub_epochs.folder_for_epochs(images, tmp_path)
    assert names(epochs / "train") == names(images / "train")
    assert names(epochs / "val") == names(images / "test")


def test_the_most_accurate_rate_on_held_out_images_wins() -> None:
    trials = {
        "a": {"pool": "gap", "rate": 1e-4, "top1": [0.5, 0.9, 0.6]},  # the last epoch counts
        "b": {"pool": "gap", "rate": 2e-4, "top1": [0.5, 0.6, 0.7]},
        "c": {"pool": "isqrt_cov", "rate": 5e-4, "top1": [0.5, 0.6, 0.9]},
    }
    assert cub_epochs.chosen_rate(trials, "gap") == 2e-4


@needs_sparrows
@pytest.mark.slow
def test_runs_are_resumed_and_drawn(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cub_epochs, "RATES", (1e-4,))
    monkeypatch.setattr(cub_epochs, "EPOCHS", 3)
    weights = tmp_path / "weights.pth"
    torch.save(timm.create_model("test_efficientnet", num_classes=0).state_dict(), weights)
    network = cub_epochs.Network("test_efficientnet", "a small network", 1)
    monkeypatch.setitem(cub_epochs.NETWORKS, "lite0", network)
    small = {"weights": str(weights), "image_size": 64, "dim": 8, "workers": 0}
    experiment = cub_epochs.Experiment("lite0", images, tmp_path / "runs", small)
    done = {"trials": dict(experiment.trials({"trials": {}, "finals": {}})), "finals": {}}
    assert {len(trial["top1"]) for trial in done["trials"].values()} == {cub_epochs.TRIAL_EPOCHS + 1}
    done["finals"] = dict(experiment.finals(done))
    assert {len(run["top1"]) for run in done["finals"].values()} == {4}
    assert list(experiment.finals(done)) == []
    record = {"test_images": 9, "networks": {"lite0": done}}
    lines = cub_epochs.table(record).splitlines()
    assert sum(line.startswith("| a small network") for line in lines) == 2
    assert lines[-1] == "Not run: ResNet-50 with `gap` (1 seed); ResNet-50 with `isqrt_cov` (1 seed)."
    cub_epochs.draw(record, tmp_path / "epochs.png")
    assert (tmp_path / "epochs.png").stat().st_size > 5000
