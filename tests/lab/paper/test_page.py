"""The committed pages and figures match the output of the code."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from PIL import Image

from covpool.cli.train import parse
from covpool.provenance import release
from covpool.training.recipe_files import recipe_names
from lab.paper.claims import Comparison
from lab.paper.full_size import IMAGES, ROWS, FullSize
from lab.paper.page import COMPARISONS, claims_page, page, precision_differences, render, write
from lab.reproduce.experiments import EXPERIMENTS
from lab.reproduce.networks import MINIATURE
from lab.reproduce.results import table_of_runs

RESULTS = Path(__file__).parents[3] / "results"


def test_every_experiment_is_compared_with_the_paper() -> None:
    assert {one.experiment.name for one in COMPARISONS} == set(EXPERIMENTS)


@pytest.mark.parametrize("one", COMPARISONS, ids=lambda one: one.experiment.name)
def test_experiments_follow_their_schema_and_can_be_drawn(one: Comparison, tmp_path: Path) -> None:
    files = sorted(RESULTS.glob(f"*/{one.experiment.name}--*.json"))
    if not files:
        pytest.skip("there are no results next to the tests")
    for file in files:
        copy = tmp_path / file.name
        shutil.copy(file, copy)
        assert table_of_runs(json.loads(file.read_bytes())) == file.with_suffix(".csv").read_bytes()
        for made in render(one, copy):  # checks the schema
            committed = file.with_suffix(made.suffix)
            if made.suffix == ".png":  # versions of matplotlib differ in single pixels
                with Image.open(made) as new, Image.open(committed) as old:
                    assert new.size == old.size
            else:
                assert made.read_text() == committed.read_text()


def test_the_page_of_results_is_made_from_the_results() -> None:
    committed = RESULTS.parent / "docs" / "results.md"
    if not committed.exists():
        pytest.skip("there are no pages next to the tests")
    text = committed.read_text(encoding="utf-8")
    assert text.startswith(claims_page(RESULTS / release(), f"../results/{release()}"))


@pytest.mark.slow
def test_the_page_has_the_hours_at_full_size() -> None:
    committed = RESULTS.parent / "docs" / "results.md"
    if not committed.exists():
        pytest.skip("there are no pages next to the tests")
    text = page(RESULTS / release(), f"../results/{release()}")
    assert committed.read_text(encoding="utf-8") == text
    assert f"| {resnet().row} | 60 | 38.4 |" in text


def resnet() -> FullSize:
    return next(row for row in ROWS if row.recipe == "resnet50-imagenet" and not row.changes)


def test_networks_that_were_trained_in_two_precisions() -> None:
    errors = []
    for name in ("figure2", "approximation"):
        files = sorted((RESULTS / release()).glob(f"{name}--*.json"))
        if len(files) != 1:
            pytest.skip("there is not one file of results next to the tests")
        runs = json.loads(files[0].read_bytes())["runs"]
        errors.append({run["label"]: run for run in runs if run["seed"] == 0})
    coarse, fine = errors
    assert {coarse[label]["precision"] for label in fine} == {"bfloat16"}
    assert {run["precision"] for run in fine.values()} == {"float32"}
    last = [[one[label]["epochs"][-1]["top1_error"] for label in fine] for one in errors]
    expected = [after - before for before, after in zip(*last, strict=True)]
    assert sorted(precision_differences(EXPERIMENTS.values(), RESULTS, MINIATURE)) == pytest.approx(
        sorted(expected)
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.row)
def test_commands_are_commands(row: FullSize) -> None:
    words = shlex.split(row.command())
    assert words[:6] == ["torchrun", "--nproc-per-node", "8", "-m", "covpool", "train"]
    parse(words[6:])


def test_every_recipe_for_imagenet_is_there() -> None:
    assert {row.recipe for row in ROWS} == {name for name in recipe_names() if "imagenet" in name}


def test_arithmetic() -> None:
    row = resnet()
    # 12.9 GFLOP forward (docs/scale.md), and twice as much backward.
    assert row.gigaflops == pytest.approx(3 * 12.86, rel=0.02)
    rate = 8 * 312e12 * 0.1 / (row.gigaflops * 1e9)
    assert row.hours() == pytest.approx(IMAGES * 60 / rate / 3600)


@pytest.mark.slow
def test_the_page_of_no_results_says_so(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (file,) = write(tmp_path / "results", tmp_path / "docs" / "results.md")
    assert "0 claims hold here" in " ".join(file.read_text().split())
    assert "| agrees |\n" not in file.read_text()
