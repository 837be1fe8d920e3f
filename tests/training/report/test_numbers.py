"""The files that a report reads, the metrics per class, and the intervals."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from covpool.data.image_set import ENCODING, ERRORS
from covpool.training.report.record import (
    HEADER,
    PairedDifference,
    Predictions,
    errors_by_pair,
    per_class,
    per_class_csv,
    read_run,
    wilson,
)
from tests.training.report.runs import invented, write_run

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
        file.write(json.dumps({"step": 40, "loss": 9.0, "lr": 0.5}) + "\n")  # a repeated step
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


@pytest.fixture
def predictions(tmp_path: Path) -> Predictions:
    """Return predictions for 30 classes. Three have no images, and one of these is never predicted."""
    images = [(name, label) for name, label in invented(30, 12) if label not in (3, 28, 29)]
    classes = [f"class {number}" for number in range(30)]
    found = read_run(write_run(tmp_path, classes, images, accuracy=0.6)).predictions
    found.predicted[found.predicted == 29] = 28
    return found


def test_figures_are_those_of_scikit_learn(predictions: Predictions) -> None:
    rows = per_class(predictions)
    expected = precision_recall_fscore_support(
        predictions.labels, predictions.predicted, labels=np.arange(30), zero_division=np.nan
    )
    for column, name in zip(expected, ("precision", "recall", "f1", "images"), strict=True):
        np.testing.assert_allclose([getattr(row, name) for row in rows], column, rtol=1e-12)
    assert [row.name for row in rows] == list(predictions.classes)
    assert np.isnan([rows[29].precision, rows[29].recall, rows[29].f1]).all()


def test_most_confused_with(predictions: Predictions) -> None:
    table = confusion_matrix(predictions.labels, predictions.predicted, labels=np.arange(30))
    np.fill_diagonal(table, 0)
    for row, counts in zip(per_class(predictions), table, strict=True):
        assert row.times == counts.max()
        expected = predictions.classes[counts.argmax()] if counts.any() else ""
        assert row.confused_with == expected


def test_errors_are_counted_once(predictions: Predictions) -> None:
    table = confusion_matrix(predictions.labels, predictions.predicted, labels=np.arange(30))
    np.fill_diagonal(table, 0)
    errors = errors_by_pair(predictions)
    assert (np.diff(errors.times) <= 0).all()
    assert (table[errors.labels, errors.predicted] == errors.times).all()
    assert errors.times.sum() == table.sum() == (~predictions.right).sum()


def test_the_file(predictions: Predictions, tmp_path: Path) -> None:
    rows = per_class(predictions)
    rows[0] = rows[0]._replace(name='a "b", c\nd', confused_with="\udcff鳥")
    (tmp_path / "per_class.csv").write_bytes(per_class_csv(rows))
    with (tmp_path / "per_class.csv").open(encoding=ENCODING, errors=ERRORS, newline="") as file:
        header, *lines = csv.reader(file)
    assert tuple(header) == HEADER
    assert (lines[0][0], lines[0][5]) == ('a "b", c\nd', "\udcff鳥")
    assert lines[29] == ["class 29", "0", "", "", "", "", "0"]
    for line, row in zip(lines, rows, strict=True):
        assert float(line[3] or "nan") == pytest.approx(row.recall, rel=1e-5, nan_ok=True)


@pytest.mark.parametrize(("share", "images"), [(0.5, 20), (0.9, 60), (0.98, 300)])
def test_wilson_covers_the_true_share(share: float, images: int) -> None:
    right = np.random.default_rng(0).binomial(images, share, 4000)
    intervals = {r: wilson(r, images) for r in set(right.tolist())}
    covered = [intervals[r][0] <= share <= intervals[r][1] for r in right.tolist()]
    assert 0.92 < np.mean(covered) < 0.98


def test_wilson_at_the_ends() -> None:
    assert wilson(0, 10)[0] == 0
    assert wilson(10, 10)[1] == 1
    assert wilson(10, 10)[0] == pytest.approx(0.7225, abs=1e-4)


@pytest.mark.parametrize(
    ("first_only", "second_only", "images"),
    [(0.1, 0.1, 100), (0.2, 0.05, 60), (0.03, 0.01, 615), (0.3, 0.2, 30)],
)
def test_the_interval_of_a_difference_covers_the_true_one(
    first_only: float, second_only: float, images: int
) -> None:
    random = np.random.default_rng(1)
    both = [first_only, second_only, 1 - first_only - second_only]
    covered = []
    for first, second, _ in random.multinomial(images, both, 4000):
        low, high = PairedDifference(images, int(first), int(second)).interval
        covered.append(low <= first_only - second_only <= high)
    assert 0.93 < np.mean(covered) < 0.985


def sign_test(first: int, second: int) -> float:
    """Return the two-sided p-value for a fair coin."""
    tosses = first + second
    tail = sum(math.comb(tosses, k) for k in range(min(first, second) + 1))
    return min(1.0, 2 * tail / 2**tosses)


@pytest.mark.parametrize(("first", "second"), [(0, 5), (3, 3), (10, 2), (125, 66), (900, 1000)])
def test_the_p_value_is_that_of_a_sign_test(first: int, second: int) -> None:
    assert PairedDifference(5000, first, second).p_value == pytest.approx(sign_test(first, second), rel=1e-9)


def test_models_that_agree_differ_by_nothing_but_not_for_certain() -> None:
    same = PairedDifference(50, 0, 0)
    low, high = same.interval
    assert low < 0 < high
    assert (same.difference, same.p_value, same.is_clear) == (0, 1, False)


def test_clear_is_what_test_and_interval_call_so() -> None:
    assert PairedDifference(615, 125, 66).is_clear
    assert PairedDifference(615, 66, 125).is_clear
    assert not PairedDifference(615, 30, 25).is_clear
    assert not PairedDifference(100, 5, 0).is_clear  # the p-value is 1/16
