"""Networks, data, training and budget of the miniature experiments."""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from covpool.errors import NotFiniteError, TrainingError
from covpool.models.create import build_model
from covpool.training.checkpoint import list_checkpoints, read_checkpoint, write_checkpoint
from covpool.training.recipe_files import write_recipe
from covpool.training.run_folder import RunFolder
from lab.reproduce.experiments import EXPERIMENTS
from lab.reproduce.networks import MINIATURE, SMALLEST, Configuration
from lab.reproduce.observation import observed
from lab.reproduce.training import (
    affordable_seeds,
    estimated_seconds,
    is_done,
    seconds_of,
    trained,
    write_subset,
)

CONFIGURATION = Configuration("alexnet", "isqrt_cov", {"steps": 3})


@pytest.fixture
def data(tiny_imagenet: Path, tmp_path: Path) -> Path:
    write_subset(tiny_imagenet, 2, tmp_path / "data.csv")
    return tmp_path / "data.csv"


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def train_recipe(recipe: Any) -> None:
        Path(recipe.out).mkdir(parents=True)
        write_recipe(recipe, RunFolder(Path(recipe.out)).recipe)
        raise error

    monkeypatch.setattr("lab.reproduce.training.train_recipe", train_recipe)


def test_a_loss_that_is_not_finite_is_a_result(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, NotFiniteError("11 steps had a loss or a gradient that is not finite, more than"))
    for _ in range(2):  # the second time it is read from disk
        found = trained(CONFIGURATION, SMALLEST, data, tmp_path)
        assert found["failed"] == "11 steps had a loss or a gradient that is not finite"
    assert is_done(CONFIGURATION, tmp_path)
    recipe = RunFolder(tmp_path / CONFIGURATION.name).recipe
    recipe.write_text(re.sub(r"(?m)^batch_size: \d+", "batch_size: 7", recipe.read_text()))
    with pytest.raises(ValueError, match="was started with --batch-size 7"):
        trained(CONFIGURATION, SMALLEST, data, tmp_path)


def test_other_errors_are_none(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, TrainingError("a worker died"))
    with pytest.raises(TrainingError, match="a worker died"):
        trained(CONFIGURATION, SMALLEST, data, tmp_path)
    assert not is_done(CONFIGURATION, tmp_path)


def test_a_checkpoint_from_the_middle_is_no_epoch(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covpool.training.report.write_report", lambda folder, images, model: folder)
    trained(CONFIGURATION, SMALLEST, data, tmp_path)
    folder = tmp_path / CONFIGURATION.name / "checkpoints"
    (last,) = list_checkpoints(folder)
    checkpoint = read_checkpoint(last)
    write_checkpoint(folder, type(checkpoint)(checkpoint.step + 5, checkpoint.tensors, checkpoint.state))
    assert [epoch["epoch"] for epoch in observed(CONFIGURATION, SMALLEST, data, tmp_path)] == [0, 1]


def test_it_lists_some_classes(tiny_imagenet: Path, tmp_path: Path) -> None:
    write_subset(tiny_imagenet, 3, tmp_path / "a.csv")
    with (tmp_path / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert Counter(row["split"] for row in rows) == {"train": 120, "val": 60}
    assert len({row["label"] for row in rows}) == 3
    for row in rows:
        image = tmp_path / row["path"]
        assert image.is_file()
        assert row["label"] in str(image.resolve())  # the links lead to tiny10, whose paths contain the label


def test_moved_images_have_the_same_names(tiny_imagenet: Path, tmp_path: Path) -> None:
    write_subset(tiny_imagenet, 3, tmp_path / "a.csv")
    before = (tmp_path / "a.csv").read_bytes()
    (tmp_path / "elsewhere").symlink_to(tiny_imagenet)
    write_subset(tmp_path / "elsewhere", 3, tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_bytes() == before


def test_the_same_classes_every_time(tiny_imagenet: Path, tmp_path: Path) -> None:
    for name in "ab":
        write_subset(tiny_imagenet, 4, tmp_path / f"{name}.csv")
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not Tiny-ImageNet, .*wnids.txt is missing: give --data"):
        write_subset(tmp_path, 3, tmp_path / "a.csv")


def test_too_many_classes(tiny_imagenet: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 10 classes, fewer than 11"):
        write_subset(tiny_imagenet, 11, tmp_path / "a.csv")


def built(configuration: Configuration) -> torch.nn.Module:
    return build_model(configuration.recipe(MINIATURE, Path("a.csv"), Path("runs")).model)


def test_networks_are_of_the_papers_form() -> None:
    alexnet = built(Configuration("alexnet", "isqrt_cov"))
    assert alexnet.forward_features(torch.randn(2, 3, 64, 64)).shape == (2, 64, 7, 7)
    assert alexnet.pool.reduction is None
    assert alexnet.config.pool_options == {"iteration": "paper", "steps": 5}
    for network in ("resnet10", "resnet18", "resnet26"):
        resnet = built(Configuration(network, "isqrt_cov"))
        # The last stage keeps the resolution of the one before it, and 1x1 convolutions reduce its channels.
        assert resnet.forward_features(torch.randn(2, 3, 96, 96)).shape == (2, 128, 6, 6)
        assert resnet.pool.dim == 64
    assert built(Configuration("resnet10", "gap")).forward_features(torch.randn(2, 3, 96, 96)).shape[-1] == 3


def test_depths() -> None:
    for layers in (10, 18, 26):
        resnet = built(Configuration(f"resnet{layers}", "gap"))
        blocks = [m for name, m in resnet.backbone.named_modules() if name.startswith("layer")]
        convolutions = [m for m in blocks if isinstance(m, torch.nn.Conv2d) and m.kernel_size == (3, 3)]
        assert len(convolutions) + 2 == layers


def test_runs_that_differ_have_other_names() -> None:
    names = {}
    for experiment in EXPERIMENTS.values():
        for _, configuration in experiment.configurations(3):
            assert names.setdefault(configuration.name, configuration) == configuration
    assert len(names) > 80


def test_an_unknown_network() -> None:
    with pytest.raises(ValueError, match="network must be one of alexnet, resnet10"):
        Configuration("resnet50", "gap")


def runs(seeds: int) -> list[Configuration]:
    return [Configuration("alexnet", pool, seed=seed) for seed in range(seeds) for pool in ("gap", "cov")]


@pytest.mark.parametrize(("budget", "seeds"), [(60.0, 3), (59.0, 2), (39.9, 1), (20.0, 1)])
def test_fewer_seeds_not_fewer_rows(budget: float, seeds: int) -> None:
    assert affordable_seeds(runs, lambda _: 10.0, 3, budget) == seeds


def test_not_even_one_seed() -> None:
    with pytest.raises(ValueError, match="one seed of all runs takes about 20 s, more than --budget 19 s"):
        affordable_seeds(runs, lambda _: 10.0, 3, 19.0)


def test_words() -> None:
    assert seconds_of("1.5h") == 5400
    with pytest.raises(ValueError, match="as 8h or 90m; got '8 hours'"):
        seconds_of("8 hours")


@pytest.mark.slow
def test_an_estimate_grows_with_the_work(tiny_imagenet: Path, tmp_path: Path) -> None:
    write_subset(tiny_imagenet, 2, tmp_path / "a.csv")
    small = estimated_seconds(Configuration("alexnet", "gap"), SMALLEST, tmp_path / "a.csv")
    large = estimated_seconds(Configuration("resnet26", "isqrt_cov"), SMALLEST, tmp_path / "a.csv")
    assert 0 < small < large < 600
