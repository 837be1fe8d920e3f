"""The learning rate search: the rates that it tries, when it stops, and its suggestion."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from covpool.training.lr_find import HIGHEST, LOWEST, find_lr, smooth
from covpool.training.recipe import Recipe
from covpool.training.recipe_files import read_recipe
from covpool.training.step import Learner, Outcome
from tests.data.pictures import TINY10, needs_tiny10
from tests.data.trees import plant

SMALL = {
    "model.backbone": "test_resnet",
    "model.dim": 8,
    "model.image_size": 64,
    "data.workers": 0,
    "augmentation.crop": "test",
    "loss.mixup": 0.0,
    "loop.device": "cpu",
}


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """Return a recipe with six images, for tests with made-up losses."""
    plant(tmp_path / "birds", *(f"{name}/{i}.jpg" for name in ("wren", "jay") for i in range(3)))
    own = {"data.path": str(tmp_path / "birds"), "data.val_fraction": 0, "batch_size": 2}
    return read_recipe("modern", {**SMALL, **own, "out": str(tmp_path / "out")})


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], float]], list[int]]:
    """Replace training steps: losses are a function of the cursor, and non-finite losses are faults.

    The figure is left empty, because drawing it takes most of the time.
    """
    monkeypatch.setattr("covpool.drawing.png", lambda figure: b"")

    def pretend(loss: Callable[[int], float]) -> list[int]:
        taken = []

        def step(learner: Learner, batch: Any, cursor: int) -> Outcome:
            taken.append(cursor)
            learner.schedule.set_rates(learner.optimizer, cursor)
            is_bad = not math.isfinite(loss(cursor))
            return Outcome(loss(cursor), 0.5, 1.0, skipped=is_bad, counts=is_bad)

        monkeypatch.setattr(Learner, "step", step)
        return taken

    return pretend


@needs_tiny10
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.slow)])
def test_a_network(tmp_path: Path, optimizer: str) -> None:
    # Every step has the same images, so that the loss has no noise.
    own = {"data.path": str(TINY10), "data.limit": 16, "batch_size": 16, "optimizer.name": optimizer}
    out = tmp_path / "out"
    found = find_lr(read_recipe("modern", {**SMALL, **own, "out": str(out), "loop.ema": 0.9}), steps=20)
    np.testing.assert_allclose(
        found.rates, (LOWEST * (HIGHEST / LOWEST) ** (np.arange(20) / 19))[: len(found.rates)]
    )
    assert found.suggestion is not None
    assert 1e-4 < found.suggestion < 1
    assert sorted(path.name for path in out.iterdir()) == ["lr_find.csv", "lr_find.png"]
    with Image.open(out / "lr_find.png") as figure:
        figure.load()
    rows = list(csv.DictReader((out / "lr_find.csv").read_text("utf-8").splitlines()))
    assert [float(row["lr"]) for row in rows] == found.rates.tolist()
    assert [float(row["loss"]) for row in rows] == found.losses.tolist()
    assert [float(row["smoothed"]) for row in rows] == found.smoothed.tolist()


def valley(steps: int, at: int, noise: float = 0.0) -> list[float]:
    """Return losses that fall by 1, fastest at step ``at``, and explode near the end."""
    x = np.arange(steps)
    random = np.random.default_rng(0).normal(size=steps)
    explosion = np.exp(np.minimum((x - 0.9 * steps) / 2, 40))
    fallen = 1 / (1 + np.exp(-(x - at) / (0.05 * steps)))
    return (2.3 - fallen + noise * random + np.where(x > 0.9 * steps, explosion, 0)).tolist()


@pytest.mark.parametrize(("at", "noise"), [(50, 0.0), (65, 0.05)])
def test_where_the_loss_falls_fastest(recipe: Recipe, steps: Any, at: int, noise: float) -> None:
    losses = valley(100, at, noise)
    taken = steps(losses.__getitem__)
    found = find_lr(recipe, 100)
    place = math.log10(found.suggestion or 1) - math.log10(found.rates[at])
    assert abs(place) < (0.5 if noise else 0.15)
    # It stops soon after the explosion begins. An epoch has three steps.
    assert 92 <= len(taken) == len(found.rates) < 99


def test_one_explosion_does_not_hide_what_was_before_it() -> None:
    losses = valley(100, 50)[:90]
    np.testing.assert_allclose(smooth([*losses, 1e9], 5)[:70], smooth(losses, 5)[:70], rtol=1e-3)


@pytest.mark.parametrize(
    "loss",
    [
        lambda i: 2.3,
        lambda i: 2.3 + 0.1 * i,
        lambda i: 2.3 + 0.2 * float(np.random.default_rng(i).normal()),
        lambda i: 2.3 - 0.0003 * i + 0.2 * float(np.random.default_rng(i).normal()),
    ],
    ids=["flat", "rising", "noise", "hidden in noise"],
)
def test_no_rate_stands_out(recipe: Recipe, steps: Any, loss: Callable[[int], float]) -> None:
    steps(loss)
    assert find_lr(recipe, 60).suggestion is None
    assert (Path(recipe.out) / "lr_find.png").exists()


def test_a_loss_that_is_not_finite_ends_it(recipe: Recipe, steps: Any) -> None:
    taken = steps(lambda i: 2.3 - 0.01 * i if i < 30 else math.nan)
    found = find_lr(recipe, 100)
    assert taken == list(range(31))
    assert len(found.rates) == len(found.losses) == 30
    assert np.isfinite(found.smoothed).all()
    steps(lambda i: math.nan)
    with pytest.raises(ValueError, match=r"^the loss is not finite at the lowest learning rate, 1e-06$"):
        find_lr(recipe, 100)


def test_too_few_steps(recipe: Recipe) -> None:
    with pytest.raises(ValueError, match=r"^steps must be at least 20; got 19$"):
        find_lr(recipe, 19)
    assert not Path(recipe.out).exists()


@pytest.mark.slow
def test_in_two_stages_the_head_learns_alone(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    learning = []

    def step(learner: Learner, batch: Any, cursor: int) -> Outcome:
        learning.append({name for name, one in learner.model.named_parameters() if one.requires_grad})
        return Outcome(1.0, 0.5, 1.0, skipped=False, counts=False)

    monkeypatch.setattr(Learner, "step", step)
    two = dataclasses.replace(recipe, schedule=dataclasses.replace(recipe.schedule, head_first=0.5))
    for each in (recipe, two):
        find_lr(each, 30)
    assert any(name.startswith("backbone") for name in learning[0])
    assert learning[-1]
    assert not any(name.startswith("backbone") for name in learning[-1])
