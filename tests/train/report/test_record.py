"""Files as a run leaves them, also one that was killed or had nothing to measure by."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from covpool.train.report.record import read_run
from tests.train.report.runs import invented, write_run

CLASSES = ["a", "b", "c"]


def test_predictions_and_epochs(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, CLASSES, invented(3, 40), epochs=4))
    lines = (tmp_path / "predictions.csv").read_text(encoding="utf-8").splitlines()[1:]
    assert [name for name in run.predictions.names] == [line.split(",")[0] for line in lines]
    rights = [line.split(",")[1] == line.split(",")[2] for line in lines]
    assert run.predictions.right.tolist() == rights
    assert run.epoch_ends.tolist() == [1, 2, 3, 4]
    assert np.isfinite(run.epoch_column("top1")).all()
    np.testing.assert_allclose(run.step_positions, np.arange(1, 161) / 40)


def test_without_validation_the_columns_are_empty(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, CLASSES, [], split=None, validation=False))
    assert np.isnan(run.epoch_column("top1")).all()
    assert np.isfinite(run.epoch_column("train_top1")).all()
    assert len(run.predictions) == 0


def test_a_log_of_a_run_that_was_killed(tmp_path: Path) -> None:
    write_run(tmp_path, CLASSES, invented(3, 4), epochs=1)
    with (tmp_path / "log.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 40, "loss": 9.0, "lr": 0.5}) + "\n")  # done again
        file.write(json.dumps({"event": "skipped", "step": 41}) + "\n")
        file.write(json.dumps({"step": 41, "loss": None, "lr": 0.5}) + "\n")
        file.write('{"step": 42, "lo')
    run = read_run(tmp_path)
    assert run.steps["step"].tolist() == list(range(1, 42))
    assert run.steps["loss"][39] == 9.0
    assert np.isnan(run.steps["loss"][40])
    assert dict(run.events) == {"resumed": 1, "skipped": 1}


def test_a_summary_is_enough(tmp_path: Path) -> None:
    write_run(tmp_path, CLASSES, invented(3, 4))
    for path in tmp_path.iterdir():
        if path.name != "summary.json":
            path.unlink()
    run = read_run(tmp_path)
    assert (len(run.predictions), len(run.epoch_ends), len(run.step_positions), run.recipe) == (0, 0, 0, "")


def test_a_class_that_is_nowhere_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, CLASSES, invented(3, 4))
    (tmp_path / "predictions.csv").write_text(
        "name,label,predicted,confidence,label_confidence,loss\n1.jpg,a,wren,0.9,0.1,2.3\n", encoding="utf-8"
    )
    with pytest.raises(ValueError, match=r"'wren' that summary\.json does not list"):
        read_run(tmp_path)
