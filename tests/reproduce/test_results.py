"""The committed results of experiments are what their code would print."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from PIL import Image

from covpool.provenance.machine import release
from covpool.reproduce import (
    bulk,
    exports,
    fine_grained,
    fine_tuning,
    location_maps,
    precisions,
    record,
    sparrows,
    spectra,
    tiny10,
    why_second_order,
)
from covpool.reproduce.experiments import TRAINED
from covpool.reproduce.experiments.experiment import Experiment
from covpool.reproduce.miniature.configuration import MINIATURE
from covpool.reproduce.page import page

RESULTS = Path(__file__).parents[2] / "results"


EXPERIMENTS = [
    bulk,
    exports,
    fine_grained,
    fine_tuning,
    location_maps,
    sparrows,
    spectra,
    tiny10,
    why_second_order,
]


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda module: module.__name__)
def test_tables_are_made_from_the_figures(experiment: object) -> None:
    name = experiment.__name__.rpartition(".")[2]  # type: ignore[attr-defined]
    files = sorted(RESULTS.glob(f"*/{name}--*.json"))
    if not files:
        pytest.skip("there are no results beside the tests")
    for file in files:
        results = json.loads(file.read_bytes())
        assert file.with_suffix(".md").read_text() == f"{experiment.table(results)}\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize("experiment", TRAINED, ids=lambda experiment: experiment.name)
def test_experiments_follow_their_schema_and_can_be_drawn(experiment: Experiment, tmp_path: Path) -> None:
    files = sorted(RESULTS.glob(f"*/{experiment.name}--*.json"))
    if not files:
        pytest.skip("there are no results beside the tests")
    for file in files:
        copy = tmp_path / file.name
        shutil.copy(file, copy)
        for made in record.render(experiment, copy):  # checks the schema
            committed = file.with_suffix(made.suffix)
            if made.suffix == ".png":  # matplotlib's versions differ in a pixel here and there
                with Image.open(made) as new, Image.open(committed) as old:
                    assert new.size == old.size
            else:
                assert made.read_text() == committed.read_text()


def test_the_page_of_results_is_made_from_the_results() -> None:
    committed = RESULTS.parent / "docs" / "results.md"
    if not committed.exists():
        pytest.skip("there are no pages beside the tests")
    assert committed.read_text(encoding="utf-8") == page(RESULTS / release(), f"../results/{release()}")


def test_networks_that_were_trained_in_two_precisions() -> None:
    errors = []
    for name in ("figure2", "approximation"):
        files = sorted((RESULTS / release()).glob(f"{name}--*.json"))
        if len(files) != 1:
            pytest.skip("there is not one file of results beside the tests")
        runs = json.loads(files[0].read_bytes())["runs"]
        errors.append({run["label"]: run for run in runs if run["seed"] == 0})
    coarse, fine = errors
    assert {coarse[label]["precision"] for label in fine} == {"bfloat16"}
    assert {run["precision"] for run in fine.values()} == {"float32"}
    last = [[one[label]["epochs"][-1]["top1_error"] for label in fine] for one in errors]
    expected = [after - before for before, after in zip(*last, strict=True)]
    assert sorted(precisions.differences(TRAINED, RESULTS, MINIATURE)) == pytest.approx(sorted(expected))


def test_the_page_on_probing_quotes_the_results() -> None:
    page = (RESULTS.parent / "docs" / "probing.md").read_text(encoding="utf-8")
    tables = "".join(file.read_text(encoding="utf-8") for file in RESULTS.glob("*/fine_grained--*.md"))
    if not tables:
        pytest.skip("there are no results beside the tests")
    measured = page.partition("## Measured")[2].partition("## From Python")[0]
    quoted = re.findall(r"\d\d\.\d(?: ± \d\.\d)?", measured)
    assert len(quoted) > 10
    assert [number for number in quoted if number not in tables] == []


def test_a_row_has_mean_and_deviation() -> None:
    base = dict.fromkeys(("seed", "parameters", "seconds", "source", "versions", "machine"))
    runs = [{**base, "last_epoch": {"top1": t}, "metrics": {"top1": t + 0.1}} for t in (0.5, 0.6, 0.7)]
    row = tiny10._row("gap", runs)
    assert (row["mean"], row["sd"]) == (pytest.approx(0.6), pytest.approx(0.1))
    assert "| gap | 60.0 ± 10.0 | 50.0, 60.0, 70.0 |" in tiny10.table({"rows": [row]})
