"""The command line of ``covpool lr-find``; the search itself is tested elsewhere."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from covpool.cli.main import main
from covpool.training import lr_find as search
from covpool.training.lr_find import Sweep
from covpool.training.recipe import Recipe
from covpool.training.recipe_files import read_recipe
from tests.cli.test_train import FROZEN


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Recipe, int]]:
    """Record the requested searches without running them; seed 1 finds no learning rate."""
    asked: list[tuple[Recipe, int]] = []

    def find_lr(recipe: Recipe, steps: int) -> Sweep:
        asked.append((recipe, steps))
        column = np.array([0.001, 0.0123, 2.5])
        return Sweep(column, column, column, None if recipe.seed == 1 else 0.0123)

    monkeypatch.setattr(search, "find_lr", find_lr)
    return asked


def test_a_suggestion(searches: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    words = "--steps 300 --data d --out OUT --recipe resnet50-cars --batch-size 8"
    assert main(["lr-find", *words.split()]) == 0
    expected = read_recipe("resnet50-cars", {"data.path": "d", "out": "OUT", "batch_size": 8})
    assert searches == [(expected, 300)]
    assert capsys.readouterr() == (
        "--lr 0.012: there the loss fell fastest, of all up to 2.5\ncurve: OUT/lr_find.png\n",
        "",
    )


def test_in_two_stages_it_is_the_rate_of_the_head(
    searches: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lr-find", "d", "--recipe", "finetune"]) == 0
    assert searches == [(read_recipe("finetune", {"data.path": "d"}), 100)]
    assert capsys.readouterr().out.startswith("--schedule.head-lr 0.012: there the loss fell fastest")


def test_no_suggestion_is_told(searches: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lr-find", "--data", "d", "--seed", "1"]) == 0
    assert searches == [(read_recipe(None, {"data.path": "d", "seed": 1}), 100)]
    assert capsys.readouterr().out.startswith("no rate up to 2.5 stands out: ")
    assert main(["lr-find", "--data", "d", "--seed", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "option": "--lr",
        "suggestion": None,
        "highest": 2.5,
        "steps": 3,
        "figure": "runs/train/lr_find.png",
        "table": "runs/train/lr_find.csv",
    }


def test_it_has_the_options_of_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lr-find", "--help-all"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: covpool lr-find DATA")
    listed = {word.strip(",") for word in text.split() if word.startswith("--")}
    assert "--steps" in listed
    assert {"--data", "--optimizer.name", "--lr", "--json", "--debug"} <= listed
    assert listed - {"--steps"} < set(FROZEN.split())
    assert not {"--compare", "--print-config"} & listed


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--steps 30", "the data is missing: a folder of images, a CSV of path,label, or shards"),
        ("--data d --steps x", "--steps takes a whole number; got x"),
        (
            "--data d --compare gap",
            "unrecognized arguments: --compare gap; covpool lr-find --help lists the options",
        ),
    ],
)
def test_mistakes(words: str, sentence: str, searches: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lr-find", *words.split()]) == 2
    assert capsys.readouterr() == ("", f"covpool lr-find: {sentence}\n")
    assert not searches
